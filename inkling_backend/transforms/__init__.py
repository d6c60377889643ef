"""What may stand between a model's Q, K, V and the cache's formats without changing attention."""

from inkling_backend.transforms.center import PoolCenters, center_of
from inkling_backend.transforms.hadamard import rotate
from inkling_backend.transforms.key import KeyTransform

__all__ = ["KeyTransform", "PoolCenters", "center_of", "rotate"]
