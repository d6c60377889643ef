"""FlashInfer's FA3 prefill with a softmax of our own, compiled once.

FlashInfer compiles an attention variant into its kernel. Ours differs from the one it ships with in
what serving from a block-scaled cache needs:

- the global scales of K and V are read on the device when the kernel runs;
- a hidden logit is minus infinity, not -50000, which a small scale of logits would let through;
- a tile in which a row sees nothing leaves the row exactly as it was, and no multiplication feeds
  an addition that the compiler may or may not fuse. So a row has the same bits in whatever chunk
  of its prompt it is computed: tiles of K and V begin at multiples of their size from position 0,
  are taken from the last that the row sees to the first, and rows of a tile do not mix;
- the soft-cap is accurate (FlashInfer's is the hardware's tanh, good to 2**-11).
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from functools import cache
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_VARIANT = r"""
template <int NUM_ROWS_PER_THREAD>
struct InklingSoftmax {
  constexpr static float fill_value = -INFINITY;
  using TensorT = decltype(make_tensor<float>(Shape<Int<NUM_ROWS_PER_THREAD>>{}));
  TensorT row_max, row_sum, scores_scale;
  float scale_log2;

  CUTLASS_DEVICE InklingSoftmax(float scale_log2) : scale_log2(scale_log2) { clear(scores_scale); }

  __forceinline__ __device__ TensorT get_lse() const { return row_sum; }

  template <bool init, typename Tensor0>
  __forceinline__ __device__ void update(Tensor0& acc_s) {
    Tensor scores = make_tensor(acc_s.data(), convert_layout_acc_rowcol(acc_s.layout()));
    static_assert(decltype(size<0>(scores))::value == NUM_ROWS_PER_THREAD);
    TensorT last_max;
    if constexpr (!init) cute::copy(row_max, last_max);
    reduce_max<init>(scores, row_max);
#pragma unroll
    for (int mi = 0; mi < size<0>(scores); ++mi) {
      // A row that has seen nothing has no maximum; 0 keeps -inf minus -inf away.
      float base = row_max(mi) == -INFINITY ? 0.f : row_max(mi);
      float top = __fmul_rn(base, scale_log2);
      if constexpr (!init) {
        scores_scale(mi) = exp2f(__fmul_rn(last_max(mi) - base, scale_log2));
        row_sum(mi) = __fmul_rn(row_sum(mi), scores_scale(mi));
      }
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) = exp2f(__fmaf_rn(scores(mi, ni), scale_log2, -top));
      }
    }
    reduce_sum<init, /*warp_reduce=*/false>(scores, row_sum);
  }

  template <typename Tensor0>
  __forceinline__ __device__ void finalize(Tensor0& acc_s, float pv_scale = 1.f) {
    SumOp<float> sum_op;
    quad_allreduce_(row_sum, row_sum, sum_op);
#pragma unroll
    for (int mi = 0; mi < size(row_sum); ++mi) {
      // NaN where every logit was -inf: zero times infinity.
      scores_scale(mi) = pv_scale / row_sum(mi);
    }
  }

  template <typename Tensor1>
  __forceinline__ __device__ void rescale_o(Tensor1& acc_o) {
    Tensor rows = make_tensor(acc_o.data(), convert_layout_acc_rowcol(acc_o.layout()));
#pragma unroll
    for (int mi = 0; mi < size<0>(rows); ++mi) {
#pragma unroll
      for (int ni = 0; ni < size<1>(rows); ++ni) {
        rows(mi, ni) *= scores_scale(mi);
      }
    }
  }
};

template <bool CAPPED>
struct InklingAttention : AttentionVariantBase {
  float scale_log2, scale_pv, factor;

  template <typename MainloopParams, typename BlockCoord>
  __device__ InklingAttention(const MainloopParams& params, const BlockCoord& block_coord) {
    const auto& more = params.additional_params;
    float k_scale = more.maybe_k_global == nullptr ? 1.f : *more.maybe_k_global;
    scale_pv = more.maybe_v_global == nullptr ? 1.f : *more.maybe_v_global;
    scale_log2 = __fmul_rn(float(more.sm_scale_log2), k_scale);
    factor = 0.f;
    if constexpr (CAPPED) {
      factor = __fdiv_rn(scale_log2, float(more.softcap_log2));
      scale_log2 = float(more.softcap_log2);
    }
  }

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return InklingSoftmax<NUM_ROWS_PER_THREAD>(scale_log2);
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (CAPPED) {
      // tanh: near zero the difference below has no digits left.
      float x = __fmul_rn(logits, factor);
      float size = fabsf(x), square = __fmul_rn(x, x);
      float series = __fmaf_rn(square, 62.f / 2835.f, -17.f / 315.f);
      series = __fmaf_rn(square, __fmaf_rn(square, series, 2.f / 15.f), -1.f / 3.f);
      float near = __fmaf_rn(__fmul_rn(x, square), series, x);
      float far = 1.f - __fdividef(2.f, exp2f(__fmul_rn(size, 2.885390082f)) + 1.f);
      return size < 0.25f ? near : copysignf(far, x);
    } else {
      return logits;
    }
  })
};
"""

# Query rows of its smallest tile: at most so many work items a head has a batch.
CTA_ROWS = 128
# (Dk, Dv) that its ragged kernel is made for.
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))


class Kind(NamedTuple):
    """Layers that share a plan.

    window: tokens before its own that a row sees, None for all.
    capped: whether logits have a soft-cap.
    """

    window: int | None
    capped: bool


@cache
def _arguments(k_head_dim: int, v_head_dim: int, windowed: bool, capped: bool) -> dict[str, Any]:
    """What FlashInfer compiles: ``jit_args`` and ``jit_kwargs`` of its wrapper."""
    dtype = torch.bfloat16
    name = f"inkling_fa3_{k_head_dim}_{v_head_dim}_window{windowed:d}_cap{capped:d}"
    return {
        "jit_args": [
            f"{name}_{hashlib.sha256(_VARIANT.encode()).hexdigest()[:8]}",
            *(dtype, dtype, dtype, torch.int32, k_head_dim, v_head_dim),
            ["maybe_k_global", "maybe_v_global"],
            ["float", "float"],
            ["sm_scale_log2", "softcap_log2"],
            ["double", "double"],
            f"InklingAttention<{str(capped).lower()}>",
            _VARIANT,
        ],
        "jit_kwargs": {"use_sliding_window": windowed, "use_logits_soft_cap": capped},
    }


def make_wrapper(k_head_dim: int, v_head_dim: int, kind: Kind, plan_buffer: torch.Tensor) -> Any:
    """FlashInfer's wrapper around the kernel; the first one of a kind compiles it (minutes).

    Args:
        plan_buffer: ``[bytes]`` uint8 on the device, where its plans go.
    """
    flashinfer: Any = importlib.import_module("flashinfer")
    logger.info("inkling: FlashInfer's FA3 for %s; compiling it takes minutes, once", kind)
    arguments = _arguments(k_head_dim, v_head_dim, kind.window is not None, kind.capped)
    # The float workspace is for splits of K and V, which FA3 does not make.
    unused = torch.empty(256, dtype=torch.uint8, device=plan_buffer.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        unused, "NHD", backend="fa3", **arguments
    )
    wrapper.reset_workspace_buffer(unused, plan_buffer)
    return wrapper
