"""What may stand between a model's Q, K, V and the cache's formats without changing attention."""

from inkling_backend.transforms.center import PoolCenters, center_of
from inkling_backend.transforms.hadamard import rotate
from inkling_backend.transforms.key import KeyTransform
from inkling_backend.transforms.sinks import SINK_TOKENS, keep_sinks

__all__ = ["SINK_TOKENS", "KeyTransform", "PoolCenters", "center_of", "keep_sinks", "rotate"]
