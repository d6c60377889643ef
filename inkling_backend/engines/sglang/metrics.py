"""Facts of the cache on the engine's ``/metrics`` page (``--enable-metrics``).

The engine runs prometheus_client in its multiprocess mode, in which its HTTP process shows what any
of its processes has registered, so that a gauge made here needs no hook. All ranks have the same
figures; the first of them reports.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from inkling_backend.engines.sglang import versions


class CacheFacts(NamedTuple):
    """What is reported, of one GPU.

    Attributes:
        recipe, query, keys, kernels: names; ``keys`` is the key transform.
        nvfp4_scale: how NVFP4's blocks are scaled; ``none`` where there are none.
        sink_tokens: first tokens of a request that are read in BF16.
        bytes_per_token: of all its layers; without those that have a pool for windows.
        pool_tokens: tokens that the pool holds, padding not counted.
        window_pool_tokens: tokens that the pool for windows holds; 0 without one.
        pool_bytes: bytes of all pools, their padding pages included.
        workspace_bytes: bytes that attention takes beside the pool.
    """

    recipe: str
    query: str
    keys: str
    nvfp4_scale: str
    sink_tokens: int
    kernels: str
    bytes_per_token: int
    pool_tokens: int
    window_pool_tokens: int
    pool_bytes: int
    workspace_bytes: int


INFO = "inkling:kv_cache_info"
_NAMES = ("recipe", "query", "keys", "nvfp4_scale", "sink_tokens", "kernels")
# Gauge -> the field of `CacheFacts` that it shows, and what it says of it.
GAUGES: dict[str, tuple[str, str]] = {
    "inkling:kv_cache_bytes_per_token": ("bytes_per_token", "Bytes of a token in all layers."),
    "inkling:kv_cache_tokens": ("pool_tokens", "Tokens that the KV cache holds."),
    "inkling:kv_cache_window_tokens": ("window_pool_tokens", "Tokens of the pool for windows."),
    "inkling:kv_cache_bytes": ("pool_bytes", "Bytes of the KV cache, scales included."),
    "inkling:workspace_bytes": ("workspace_bytes", "Bytes of attention's own buffers."),
}


def report(facts: CacheFacts) -> None:
    """Set every gauge, if the server was started with ``--enable-metrics``."""
    arguments = versions.active_server_args()
    if not getattr(arguments, "enable_metrics", False):
        return
    model = {"model_name": str(getattr(arguments, "served_model_name", None))}
    names = {name: getattr(facts, name) for name in _NAMES}
    meaning = "Recipe of the KV cache, dtype of Q, transform of K, scales of NVFP4, sinks, kernels."
    _gauge(INFO, meaning, (*model, *names)).labels(**model, **names).set(1)
    for name, (field, meaning) in GAUGES.items():
        _gauge(name, f"{meaning} Of one GPU.", tuple(model)).labels(**model).set(
            getattr(facts, field)
        )


@cache
def _gauge(name: str, meaning: str, labels: tuple[str, ...]) -> Any:
    # Not at the top: the engine names the folder of the multiprocess mode before it is imported.
    from prometheus_client import Gauge

    return Gauge(name, meaning, labelnames=labels, multiprocess_mode="mostrecent")
