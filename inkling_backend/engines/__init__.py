"""Bindings to serving engines; the only place that may import one."""
