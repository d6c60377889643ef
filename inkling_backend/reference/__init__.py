"""Store, gather and attention in plain torch: the oracle of every kernel test, and the CPU path."""

from inkling_backend.reference.attention import attend
from inkling_backend.reference.gather import gather
from inkling_backend.reference.store import store

__all__ = ["attend", "gather", "store"]
