"""`AttentionRunner`: one model's attention on one device, from plan to output.

Use, per step: ``plan_decode`` or ``plan_extend`` once, then per layer ``store`` (K and V of the new
tokens go into the pages, Q comes back as attention reads it) and ``run``. Nothing here waits for
the device, and ``plan_decode``, ``store`` and ``run`` of a decode plan can be captured in a CUDA
graph: grids are fixed by the batch size, and lengths, pages and global scales are read on the
device when the graph replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, overload

import torch

from inkling_backend import env
from inkling_backend.attention.fa4 import Attend
from inkling_backend.attention.fa4 import reasons_against as fa4_reasons_against
from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.reference_path import ReferencePath
from inkling_backend.attention.spec import AttentionSpec, requirements
from inkling_backend.errors import InvalidTensorError, UnsupportedError
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels.arch import capability_of
from inkling_backend.reference.store import make_query


class _Path(Protocol):
    """What an implementation offers; arguments as in `AttentionRunner`, checked before."""

    @property
    def kernels(self) -> str: ...

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def split_rules(self) -> object: ...

    def prepare(self, layers: Iterable[LayerAttention]) -> None: ...

    def plan_decode(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        batch: int,
        q_len: int,
        slot_map: torch.Tensor | None,
        tree: torch.Tensor | None,
    ) -> DecodePlan: ...

    def plan_extend(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        slot_map: torch.Tensor | None,
    ) -> ExtendPlan: ...

    def store(
        self,
        cache: LayerCache,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        q: torch.Tensor | None,
        *,
        quantize_query: bool,
    ) -> Query | None: ...

    def run(
        self,
        plan: DecodePlan | ExtendPlan,
        query: Query,
        cache: LayerCache,
        out: torch.Tensor,
        layer: LayerAttention,
    ) -> None: ...


class AttentionRunner:
    """Attention of one model over block-scaled pages.

    Attributes:
        spec: the model's attention.
        max_batch: most requests of a batch.
        max_context: most tokens of a request; longer ones are cut to it rather than overrun memory.
        max_q_len: query tokens that a decode plan may have for each request, beside one.
        maps_slots: whether some layers have their pages in another pool; plans want a slot map.
        implementation: ``"triton"`` or ``"reference"``, chosen at construction.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        max_batch: int,
        max_context: int,
        max_tokens: int,
        device: torch.device | str,
        max_q_len: int = 1,
        maps_slots: bool = False,
        extend: env.Extend | None = None,
        fa4: Attend | None = None,
        like: AttentionRunner | None = None,
    ) -> None:
        """Allocates every buffer that `plan_decode`, `plan_extend` and `run` will need.

        Args:
            max_tokens: tokens that the pool holds; no request is longer.
            extend: what attends in prefill; None for what the environment says (`env.extend`).
            fa4: FA4's ``flash_attn_varlen_func``, which `env.kernels` may ask for.
            like: the runner of the same model's layers of another layout, whose buffers are used
                where they can be; its plans of extend are this one's, too (`attention.mixed`).

        Raises:
            UnsupportedError: with every reason, if this attention cannot run on the device.
        """
        self.device = torch.device(device)
        capability = capability_of(self.device)
        reasons = requirements(spec, capability, max_q_len)
        if reasons:
            raise UnsupportedError("this model", reasons)
        self.spec = spec
        self.max_batch = max_batch
        self.max_context = min(max_context, max_tokens)
        self.max_q_len = max_q_len
        self.maps_slots = maps_slots
        self.implementation = env.implementation(self.device.type)
        extend = extend or env.extend()
        self._path: _Path
        if self.implementation == "triton":
            # By the longest context that is allowed, not by what the pool holds, which is unknown
            # when the memory for prefill's copies is set aside.
            prefill = (extend, spec, max_context, capability)
            sizes = (spec, max_batch, self.max_context, max_q_len, self.device)
            shared = None if like is None else like._path
            how = {"capability": capability, "maps_slots": maps_slots}
            self._path = _triton_path(*sizes, prefill=prefill, fa4=fa4, like=shared, **how)
        elif extend == "flashinfer":
            reason = "the kernels are plain torch: set INKLING_EXTEND=auto, or run on a GPU"
            raise UnsupportedError("INKLING_EXTEND=flashinfer", [reason])
        else:
            self._path = ReferencePath(spec, self.max_context)

    def prepare(self, layers: Iterable[LayerAttention]) -> None:
        """Compiles now what takes minutes and would else be compiled when `run` first needs it.

        Args:
            layers: what the model's layers ask for; sinks do not matter.

        Raises:
            UnsupportedError: something cannot be compiled on this machine.
        """
        self._path.prepare(layers)

    @property
    def kernels(self) -> str:
        """What runs the attention, for logs."""
        return self._path.kernels

    @property
    def workspace_bytes(self) -> int:
        """Device bytes held by this runner, beside the pool; to be counted when sizing it."""
        return self._path.workspace_bytes

    def plans_as(self, other: AttentionRunner) -> bool:
        """Whether decode plans of ``other``, which this one was made ``like``, are its own, too."""
        return self._path.split_rules == other._path.split_rules

    def plan_decode(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        batch: int,
        q_len: int = 1,
        slot_map: torch.Tensor | None = None,
        tree: torch.Tensor | None = None,
    ) -> DecodePlan:
        """Plans ``q_len`` new tokens for each of ``batch`` requests.

        The plan's tensors are this runner's own, at the same addresses every time; the next
        `plan_decode` overwrites them. `plan_extend` does not.

        Args:
            slot_table: ``[rows, >= max_context]`` int32, position -> slot; whole pages per request.
            rows: ``[>= batch]`` int32 or int64, each request's row of ``slot_table``.
            seq_lens: ``[>= batch]`` int32 or int64, new tokens included; 0 for padding, otherwise
                at least ``q_len``.
            batch: requests.
            q_len: 1 or ``max_q_len``.
            slot_map: ``[slots]`` int32 or int64, the slot of the same token in the other pool of a
                runner that ``maps_slots``; whole pages together, 0 where there is none: not needed
                for tokens that every row's window has passed. `DecodePlan.mapped` reads there.
            tree: ``[batch, q_len]`` int64, contiguous; bit j of a new token's word says whether it
                sees the j-th, at most 64 of them. None: they are causal among themselves.
        """
        self._check_batch(slot_table, rows, seq_lens, batch)
        self._check_map(slot_map)
        if q_len not in (1, self.max_q_len):
            raise InvalidTensorError("q_len", "one of", (1, self.max_q_len), q_len)
        if tree is not None and (
            tuple(tree.shape) != (batch, q_len)
            or tree.dtype != torch.int64
            or not tree.is_contiguous()
        ):
            got = f"{tuple(tree.shape)} {tree.dtype}"
            raise InvalidTensorError("tree", "contiguous int64 of shape", (batch, q_len), got)
        return self._path.plan_decode(slot_table, rows, seq_lens, batch, q_len, slot_map, tree)

    def plan_extend(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        slot_map: torch.Tensor | None = None,
    ) -> ExtendPlan:
        """Plans several new tokens per request; the buffers are apart from those of decode.

        The lengths come twice: what runs on the device reads them there, and what is planned on
        the host needs them there, without waiting for the device.

        Args:
            slot_table: ``[rows, >= max_context]`` int32, position -> slot; whole pages per request.
            rows, seq_lens: ``[B]`` int32 or int64; lengths include the new tokens.
            qo_indptr: ``[B + 1]`` int32 or int64, each request's first query row.
            q_lens, kv_lens: of each request its new tokens, as in ``qo_indptr``, and its tokens, as
                in ``seq_lens`` (a request without new tokens may say anything); on the host.
            slot_map: as in `plan_decode`.
        """
        batch = rows.shape[0]
        self._check_batch(slot_table, rows, seq_lens, batch)
        self._check_map(slot_map)
        for name, lengths in (("q_lens", q_lens), ("kv_lens", kv_lens)):
            if len(lengths) != batch:
                raise InvalidTensorError(name, "lengths of requests:", batch, len(lengths))
        if tuple(qo_indptr.shape) != (batch + 1,):
            raise InvalidTensorError("qo_indptr", "shape", (batch + 1,), tuple(qo_indptr.shape))
        return self._path.plan_extend(
            slot_table, rows, seq_lens, qo_indptr, q_lens, kv_lens, slot_map
        )

    @overload
    def store(
        self,
        cache: LayerCache,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        q: torch.Tensor,
    ) -> Query: ...

    @overload
    def store(
        self,
        cache: LayerCache,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        q: None = None,
    ) -> None: ...

    def store(
        self,
        cache: LayerCache,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        q: torch.Tensor | None = None,
    ) -> Query | None:
        """Writes new tokens into the pages; gives back Q as `run` wants it (None if q is None).

        Args:
            k, v: ``[T, kv heads, Dk]``, ``[T, kv heads, Dv]``.
            slots: ``[T]`` int32 or int64; a slot of 0 or below is skipped.
            q: ``[T, query heads, Dk]`` or None.
        """
        return self._path.store(cache, k, v, slots, q, quantize_query=self.spec.quantize_query)

    def query(self, cache: LayerCache, q: torch.Tensor) -> Query:
        """Q ``[T, query heads, Dk]`` as `run` wants it, where K and V are in the pages already."""
        return make_query(q, cache, quantize_q=self.spec.quantize_query)

    def run(
        self,
        plan: DecodePlan | ExtendPlan,
        query: Query,
        cache: LayerCache,
        out: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            plan: the batch; `store` has put its new tokens into ``cache``.
            query: ``[T, query heads, Dk]``, tokens at any stride (`Query.has_dense_rows`); T is
                ``batch * q_len`` for decode, for extend at least ``qo_indptr[-1]``. Rows from there
                on are padding and their ``out`` is not written.
            out: ``[T, query heads, Dv]`` or ``[T, query heads * Dv]``, contiguous, model's dtype.
            layer: scale, window, soft-cap, causality, sinks and bias of the layer; a bias where
                ``spec`` says so, and not over a tree.

        Returns:
            ``out``.
        """
        rows = self._check_query(plan, query)
        heads, head_dim = self.spec.num_q_heads, self.spec.layout.v_head_dim
        if tuple(out.shape) not in ((rows, heads, head_dim), (rows, heads * head_dim)):
            raise InvalidTensorError("out", "shape", (rows, heads, head_dim), tuple(out.shape))
        if out.dtype != self.spec.dtype or not out.is_contiguous():
            got = f"{out.dtype}, strides {out.stride()}"
            raise InvalidTensorError("out", "contiguous", self.spec.dtype, got)
        layer.check_sinks(heads)
        layer.check_bias(rows, heads)
        if layer.bias is not None and not self.spec.relative_bias:
            raise InvalidTensorError("layer.bias", "for this runner", None, layer.bias.shape)
        if layer.bias is not None and getattr(plan, "tree", None) is not None:
            raise InvalidTensorError("layer", "without a bias over a tree", None, layer.bias.shape)
        if not layer.causal and getattr(plan, "q_len", 1) > 1:
            raise InvalidTensorError("layer", "causal", True, False)
        if layer.window is not None and getattr(plan, "tree", None) is not None:
            raise InvalidTensorError("layer", "without a window over a tree", None, layer.window)
        if rows and plan.batch and getattr(plan, "max_q_len", 1):
            self._path.run(plan, query, cache, out.view(rows, heads, head_dim), layer)
        return out

    def _check_query(self, plan: DecodePlan | ExtendPlan, query: Query) -> int:
        """Rows of the query."""
        data, scale = query
        rows = data.shape[0] if isinstance(plan, ExtendPlan) else plan.batch * plan.q_len
        shape = (rows, self.spec.num_q_heads, self.spec.layout.k_head_dim)
        if tuple(data.shape) != shape or not query.has_dense_rows:
            got = f"{tuple(data.shape)} with strides {data.stride()}"
            raise InvalidTensorError("query", "dense rows of shape", shape, got)
        wanted = self.spec.dtype if scale is None else torch.uint8
        if data.dtype != wanted:
            raise InvalidTensorError("query", "dtype", wanted, data.dtype)
        if scale is not None and tuple(scale.shape) != (*shape[:2], shape[2] // 32):
            want = (*shape[:2], shape[2] // 32)
            raise InvalidTensorError("query.scale", "shape", want, tuple(scale.shape))
        return rows

    def _check_map(self, slot_map: torch.Tensor | None) -> None:
        if (slot_map is not None) != self.maps_slots:
            expected = "a map of slots" if self.maps_slots else None
            raise InvalidTensorError("slot_map", "for this runner", expected, type(slot_map))
        if slot_map is None:
            return
        if slot_map.ndim != 1 or slot_map.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(slot_map.shape)} {slot_map.dtype}"
            raise InvalidTensorError("slot_map", "int32 or int64 of shape", "[slots]", got)

    def _check_batch(
        self, slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, batch: int
    ) -> None:
        if not 0 <= batch <= self.max_batch:
            raise InvalidTensorError("rows", "at most requests", self.max_batch, batch)
        if slot_table.ndim != 2 or slot_table.dtype != torch.int32 or slot_table.stride(1) != 1:
            got = f"{tuple(slot_table.shape)} {slot_table.dtype}, strides {slot_table.stride()}"
            raise InvalidTensorError("slot_table", "rows of", "int32 slots", got)
        if slot_table.shape[1] < self.max_context:
            expected = f"at least {self.max_context} columns"
            raise InvalidTensorError("slot_table", "shape", expected, tuple(slot_table.shape))
        for name, tensor in (("rows", rows), ("seq_lens", seq_lens)):
            if tensor.ndim != 1 or tensor.shape[0] < batch or not tensor.is_contiguous():
                raise InvalidTensorError(name, "shape", f"[>= {batch}]", tuple(tensor.shape))
            if tensor.dtype not in (torch.int32, torch.int64):
                raise InvalidTensorError(name, "dtype", "int32 or int64", tensor.dtype)


def _triton_path(
    *sizes: Any, prefill: tuple[Any, ...], fa4: Attend | None, like: Any, **how: Any
) -> _Path:
    """The path of the kernels, or of FA4 over what they store; here, because both need Triton."""
    if env.asks_for_fa4():
        from inkling_backend.attention.fa4_path import Fa4Path

        reasons = fa4_reasons_against(sizes[0], how["capability"])
        if fa4 is None:
            reasons.append("FA4 comes with SGLang: serve with it")
        if like is not None:
            reasons.append("layers have recipes of their own, and FA4 reads MXFP8 alone: unset it")
        if fa4 is None or reasons:
            raise UnsupportedError("INKLING_KERNELS=fa4", reasons)
        return Fa4Path(fa4, *sizes, **how)
    from inkling_backend.attention import flashinfer_extend
    from inkling_backend.attention.triton_path import TritonPath

    return TritonPath(*sizes, flashinfer=flashinfer_extend.chosen(*prefill), like=like, **how)
