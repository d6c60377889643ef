"""What FlashInfer's wrapper does, in plain torch: a stand-in where FlashInfer or Hopper is not."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from inkling_backend.attention.fa3 import Kind


class Standin:
    """Attends as planned, in float32, over ragged K and V; remembers how it was called.

    Like the kernel, it computes with every number of K and V that it is given: zero times NaN is
    NaN.
    """

    def __init__(self, kind: Kind, plan_buffer: torch.Tensor) -> None:
        self.kind = kind
        self.plan_buffer = plan_buffer
        self.plans = 0
        self.runs = 0

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
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type == torch.bfloat16
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu"
        self.plans += 1
        self._qo, self._kv = qo_indptr.tolist(), kv_indptr.tolist()
        self._window = math.inf if window_left < 0 else window_left
        self._heads = (num_qo_heads, num_kv_heads)
        self._dims = (head_dim_qk, head_dim_vo)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, out: torch.Tensor
    ) -> torch.Tensor:
        k_global, v_global, scale_log2, softcap_log2 = args
        assert q.dtype == k.dtype == v.dtype == out.dtype == torch.bfloat16
        assert tuple(q.shape) == (self._qo[-1], self._heads[0], self._dims[0])
        assert tuple(k.shape) == (self._kv[-1], self._heads[1], self._dims[0])
        assert tuple(v.shape) == (self._kv[-1], self._heads[1], self._dims[1])
        assert (softcap_log2 > 0) == self.kind.capped
        self.runs += 1
        factor = scale_log2 * (1.0 if k_global is None else float(k_global))
        group = self._heads[0] // self._heads[1]
        for (q0, q1), (k0, k1) in zip(pairwise(self._qo), pairwise(self._kv), strict=True):
            if q0 == q1:
                continue
            keys = k[k0:k1].float().repeat_interleave(group, 1)
            values = v[k0:k1].float().repeat_interleave(group, 1)
            logits = torch.einsum("nhd,thd->hnt", q[q0:q1].float(), keys) * factor
            if softcap_log2:
                logits = softcap_log2 * torch.tanh(logits / softcap_log2)
            position = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None]
            distance = position - torch.arange(k1 - k0)
            logits = logits.masked_fill((distance < 0) | (distance > self._window), -math.inf)
            p = torch.exp2(logits - logits.amax(-1, keepdim=True))
            got = torch.einsum("hnt,thd->nhd", p, values) / p.sum(-1).T[:, :, None]
            out[q0:q1] = got * (1.0 if v_global is None else float(v_global))
        return out
