"""Attention from a block-scaled low-bit KV cache (MXFP8, NVFP4, KVFP4, MXFP4).

Importing this needs torch only: no kernel is compiled, no engine imported, no GPU touched.
"""

from inkling_backend.compat import (
    E2M1_MAX,
    MAX_BLOCK_SCALE_FP8,
    MXFP8_BLOCK_SIZE,
    BlockFP4KVQuantizeUtil,
    FP4KVCacheRecipe,
    MXFP8Tensor,
    NVFP4KVQuantizeUtil,
    from_mxfp8,
    quant_store_kv_mxfp8,
    to_mxfp8,
    update_mxfp8_v_cache_seqblocked,
)
from inkling_backend.errors import (
    EnvironmentVariableError,
    InklingError,
    InvalidTensorError,
    UnknownNameError,
    UnsupportedError,
)
from inkling_backend.formats import (
    FORMATS,
    RECIPES,
    Format,
    Quantized,
    Query,
    Recipe,
    get_format,
    get_recipe,
)
from inkling_backend.formats.layout import CacheLayout, LayerCache

__version__ = "0.1.0"

__all__ = [
    "E2M1_MAX",
    "FORMATS",
    "MAX_BLOCK_SCALE_FP8",
    "MXFP8_BLOCK_SIZE",
    "RECIPES",
    "BlockFP4KVQuantizeUtil",
    "CacheLayout",
    "EnvironmentVariableError",
    "FP4KVCacheRecipe",
    "Format",
    "InklingError",
    "InvalidTensorError",
    "LayerCache",
    "MXFP8Tensor",
    "NVFP4KVQuantizeUtil",
    "Quantized",
    "Query",
    "Recipe",
    "UnknownNameError",
    "UnsupportedError",
    "__version__",
    "from_mxfp8",
    "get_format",
    "get_recipe",
    "quant_store_kv_mxfp8",
    "to_mxfp8",
    "update_mxfp8_v_cache_seqblocked",
]
