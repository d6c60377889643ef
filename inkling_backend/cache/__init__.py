"""Buffers of a model's cache."""

from inkling_backend.cache.pool import KVCachePool, SlotRows

__all__ = ["KVCachePool", "SlotRows"]
