"""Prefill through FlashInfer's FA3, over BF16 copies of the pages that a batch needs.

For each layer: K and V of some requests and some heads are dequantized into one buffer that all
layers share, FA3 attends over it, and so on until every request (`staging.cut_rounds`) and every
head had its turn. New tokens are read from the pages like all others. K and V are exact in BF16;
the global scales of NVFP4 are not, and are applied to logits and sums instead.

A head of a request whose V holds something that is not finite, or about to overflow, is computed
again by the Triton kernel, whose rows get NaN from tokens that they see, and from no others.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from inkling_backend.attention import fa3
from inkling_backend.attention.fa3 import CTA_ROWS, HEAD_DIMS, Kind
from inkling_backend.attention.plans import ExtendPlan
from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.attention.staging import Round, cut_rounds
from inkling_backend.env import Extend
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels.arch import Capability, runs_fa3
from inkling_backend.kernels.arguments import layer_arguments
from inkling_backend.kernels.stage import dequantize_query, stage

# Bytes that the copies take, about: 64k tokens with 8 heads of 128. One head of the longest request
# must fit; it may take more, of a Hopper's 80 GB, up to the second number.
STAGING_BYTES, MOST_STAGING_BYTES = 256 << 20, 1 << 30
# Bytes: addresses and strides of what the tensor memory accelerator loads are multiples of it.
TILE_ALIGNMENT = 16
# Rounds of a batch whose plans are kept from layer to layer; with more, each is planned again.
PLANS = 2
# FlashInfer's scheduler: int32 arrays with an item for each tile and head, up to this many tiles;
# beyond, an item for each tile.
_ARRAYS, _MOST_TILES = 7, 4096


class Wrapper(Protocol):
    """What is used of FlashInfer's ``BatchPrefillWithRaggedKVCacheWrapper``."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        out: torch.Tensor,
    ) -> torch.Tensor: ...


def reasons_against(
    spec: AttentionSpec, max_context: int, capability: Capability | None
) -> list[str]:
    """Every reason why FlashInfer's FA3 cannot attend for such a model (empty if it can).

    Nothing here or in `serves` may look at a batch: a token's result must not change with its
    company, nor with how its prompt is cut.

    Args:
        max_context: tokens of the longest request.
        capability: compute capability of the GPU, None on a machine without one.
    """
    layout, reasons = spec.layout, []
    if capability is None or not runs_fa3(capability):
        have = "no GPU" if capability is None else "compute capability " + _dotted(capability)
        reasons.append(f"FA3 runs on Hopper (compute capability 9.0) alone, here is {have}")
    if spec.relative_bias:
        reasons.append("FA3 has no relative bias, which this model adds to its logits")
    if spec.dtype != torch.bfloat16:
        reasons.append(f"its copies of K and V are bfloat16, the model is {spec.dtype}")
    dims = (layout.k_head_dim, layout.v_head_dim)
    if dims not in HEAD_DIMS:
        known = ", ".join(f"{k}/{v}" for k, v in HEAD_DIMS)
        reasons.append(f"head_dim of K/V is {dims[0]}/{dims[1]}, FA3 has {known}")
    if (size := max_context * _row_bytes(spec)) > MOST_STAGING_BYTES:
        reasons.append(
            f"a BF16 copy of one head of the longest request takes {size / 2**30:.1f} GiB, at most "
            f"{MOST_STAGING_BYTES / 2**30:.0f} are used: lower --context-length"
        )
    if importlib.util.find_spec("flashinfer") is None:
        reasons.append("FlashInfer is not installed: pip install flashinfer-python")
    elif not _finds_nvcc():
        reasons.append(
            "FlashInfer compiles its kernel and finds no nvcc: install the CUDA toolkit, or set "
            "CUDA_HOME"
        )
    return reasons


def chosen(
    extend: Extend, spec: AttentionSpec, max_context: int, capability: Capability | None
) -> bool:
    """Whether FlashInfer attends in prefill; arguments as of `env.extend` and `reasons_against`.

    Raises:
        UnsupportedError: ``extend`` is "flashinfer", which cannot serve this model here.
    """
    if extend == "triton":
        return False
    reasons = reasons_against(spec, max_context, capability)
    if reasons and extend == "flashinfer":
        raise UnsupportedError("INKLING_EXTEND=flashinfer", reasons)
    return not reasons


def serves(layer: LayerAttention) -> bool:
    """Whether a layer goes to FA3; the Triton kernel takes the others."""
    return layer.causal and layer.sinks is None


def _kind_of(layer: LayerAttention) -> Kind:
    return Kind(layer.window, layer.softcap is not None)


def staging_shape(spec: AttentionSpec, max_batch: int, max_context: int) -> tuple[int, int]:
    """(KV heads, tokens) that the copies hold: about `STAGING_BYTES`, and at least one head of the
    longest request; never more than all heads of a full batch."""
    heads = spec.layout.num_kv_heads
    fit = STAGING_BYTES // (max_context * _row_bytes(spec))
    at_once = max(h for h in range(1, heads + 1) if heads % h == 0 and h <= max(1, fit))
    tokens = min(STAGING_BYTES // (at_once * _row_bytes(spec)), max_batch * max_context)
    return at_once, max(tokens, max_context)


def _row_bytes(spec: AttentionSpec) -> int:
    """Bytes of K and V of one token and head, copied."""
    return (spec.layout.k_head_dim + spec.layout.v_head_dim) * torch.bfloat16.itemsize


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def _finds_nvcc() -> bool:
    """Whether there is a compiler where FlashInfer looks for one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or Path(home, "bin", "nvcc").is_file()


class _Plans:
    """Up to `PLANS` rounds that are planned, in one buffer each, for every kind of layer.

    All kinds put the same bytes there: a plan depends on the lengths and on causality alone.
    """

    def __init__(self, spec: AttentionSpec, heads: int, buffer: torch.Tensor) -> None:
        self._spec = spec
        self._heads = heads
        self._buffer = buffer
        self._held: Round | None = None
        self._wrappers: dict[Kind, Wrapper] = {}
        self._planned: dict[Kind, Round] = {}
        self._copied: dict[Kind, torch.cuda.Event] = {}

    def wrapper(self, kind: Kind, part: Round) -> Wrapper:
        """The wrapper of a kind, planned for a round."""
        layout = self._spec.layout
        if kind not in self._wrappers:
            self._wrappers[kind] = fa3.make_wrapper(
                layout.k_head_dim, layout.v_head_dim, kind, self._buffer
            )
        wrapper = self._wrappers[kind]
        if self._held is part and self._planned.get(kind) is part:
            return wrapper
        pinned = self._buffer.device.type == "cuda"
        if kind in self._copied:
            # The last plan leaves its page-locked memory when the device comes to it.
            self._copied[kind].synchronize()
        # On the host, where the lengths are: FlashInfer plans there, and nothing waits.
        qo, kv = (
            torch.tensor(indptr, dtype=torch.int32, pin_memory=pinned)
            for indptr in (part.qo_indptr, part.kv_indptr)
        )
        wrapper.plan(
            *(qo, kv, self._heads * self._spec.group, self._heads),
            *(layout.k_head_dim, layout.v_head_dim),
            causal=True,
            window_left=-1 if kind.window is None else kind.window,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        if pinned:
            self._copied[kind] = torch.cuda.Event()
            self._copied[kind].record()
        self._held = self._planned[kind] = part
        return wrapper


class FlashInferExtend:
    """Buffers, plans and calls for one model; arguments as of `AttentionRunner`."""

    def __init__(
        self, spec: AttentionSpec, max_batch: int, max_context: int, device: torch.device
    ) -> None:
        layout = spec.layout
        self._group = spec.group
        self._max_context = max_context
        self._heads, self._capacity = staging_shape(spec, max_batch, max_context)

        def staging(head_dim: int) -> torch.Tensor:
            shape = (self._heads, self._capacity, head_dim)
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        # Heads outermost: what a tile of one head reads is contiguous.
        self._k, self._v = staging(layout.k_head_dim), staging(layout.v_head_dim)
        self._rows = torch.zeros(max_batch, 2, dtype=torch.int32, device=device)
        self._marks = torch.zeros(max_batch, layout.num_kv_heads, dtype=torch.int32, device=device)
        size = plan_bytes(self._heads * spec.group, max_batch, self._capacity)
        self._plan_buffer = torch.empty(PLANS, size, dtype=torch.uint8, device=device)
        self._plans = [_Plans(spec, self._heads, buffer) for buffer in self._plan_buffer]

    @property
    def workspace_bytes(self) -> int:
        """Device bytes held; a call takes the dequantized queries of its batch beside them."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))

    def prepare(self, layers: Iterable[LayerAttention]) -> None:
        """Compiles what these layers need, side by side, so that no request waits for it.

        Raises:
            UnsupportedError: a kernel cannot be compiled here.
        """
        kinds = map(_kind_of, filter(serves, layers))
        builds = list({(kind.window is None, kind.capped): kind for kind in kinds}.values())
        dims = self._k.shape[-1], self._v.shape[-1]
        with ThreadPoolExecutor(max(1, len(builds))) as pool:
            made = [
                pool.submit(fa3.make_wrapper, *dims, kind, self._plan_buffer[0]) for kind in builds
            ]
            for future in made:
                try:
                    future.result()
                except Exception as error:  # whatever a compiler or its absence raises
                    said = " ".join(str(error).split())[-300:]
                    reason = f"FA3 could not be compiled ({type(error).__name__}: ...{said})"
                    remedy = "mend the CUDA toolkit, or set INKLING_EXTEND=triton"
                    raise UnsupportedError("this machine", [f"{reason}: {remedy}"]) from error

    def plan(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[Round, ...]:
        """Cuts a batch; the rows of its requests in the buffer are on the device when it runs."""
        kv_lens = [min(length, self._max_context) for length in kv_lens]
        rounds = cut_rounds(q_lens, kv_lens, self._capacity)
        rows = torch.zeros(len(q_lens), 2, dtype=torch.int32)
        for part in rounds:
            starts = torch.tensor(part.kv_indptr, dtype=torch.int32)
            rows[part.first : part.last, 0] = starts[:-1]
            rows[part.first : part.last, 1] = starts.diff()
        if self._rows.device.type == "cuda":
            rows = rows.pin_memory()
        self._rows[: len(q_lens)].copy_(rows, non_blocking=True)
        return tuple(rounds)

    def run(
        self,
        plan: ExtendPlan,
        query: Query,
        cache: LayerCache,
        out: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attention of one layer that `serves` takes; arguments as of `AttentionRunner.run`.

        Returns:
            ``[B, kv heads]`` int32, not 0 where the Triton kernel must attend again (`stage`).
        """
        assert plan.rounds, "the runner does not run a batch without query rows"
        q = self._dense(query, plan.rounds[-1].q_last)
        scale_log2, _window, softcap_log2, _sinks = layer_arguments(layer)
        kind = _kind_of(layer)
        marks = self._marks[: plan.batch]
        marks.zero_()
        for index, part in enumerate(plan.rounds):
            wrapper = self._plans[index % PLANS].wrapper(kind, part)
            rows, tokens = slice(part.q_first, part.q_last), part.kv_indptr[-1]
            for head in range(0, cache.layout.num_kv_heads, self._heads):
                stage(
                    cache,
                    page_table=plan.page_table,
                    rows=self._rows,
                    first=part.first,
                    last=part.last,
                    longest=part.longest,
                    first_head=head,
                    k_out=self._k,
                    v_out=self._v,
                    marks=marks,
                )
                q_heads = slice(head * self._group, (head + self._heads) * self._group)
                wrapper.run(
                    q[rows, q_heads],
                    self._k[:, :tokens].transpose(0, 1),
                    self._v[:, :tokens].transpose(0, 1),
                    *(cache.k_global, cache.v_global, scale_log2, softcap_log2 or 0.0),
                    out=out[rows, q_heads],
                )
        return marks

    @staticmethod
    def _dense(query: Query, rows: int) -> torch.Tensor:
        """The first rows of a query in bfloat16, exactly, where FA3's tile loads can read them."""
        if query.scale is None:
            q = query.data[:rows]
            aligned = q.data_ptr() % TILE_ALIGNMENT == 0
            step = query.row_stride * q.element_size()
            if aligned and step % TILE_ALIGNMENT == 0:
                return q
            return q.clone(memory_format=torch.contiguous_format)
        out = torch.empty(
            (rows, *query.data.shape[1:]), dtype=torch.bfloat16, device=query.data.device
        )
        dequantize_query(query, out)
        return out


def plan_bytes(num_q_heads: int, max_batch: int, capacity: int) -> int:
    """Bytes of FlashInfer's plan of any round, of at most ``capacity`` query rows."""
    tiles = math.ceil(capacity / CTA_ROWS) + max_batch
    items = max(num_q_heads * min(tiles, _MOST_TILES), tiles)
    # Alignment, and the first item of each multiprocessor; whole multiples, for the next buffer.
    return -(-(_ARRAYS * (4 * items + 16) + 4096) // 256) * 256
