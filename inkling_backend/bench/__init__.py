"""Benchmarks: what the engine runs, beside the attention libraries found on the host.

``python -m inkling_backend.bench`` and ``inkling-backend bench`` are the same. No time without a
comparison with the float32 reference first.
"""
