"""The attention backend: the engine's batches in, `AttentionRunner` plans and runs out.

New tokens are stored first, then attention reads pages alone. Decode plans inside the CUDA graph
from the graph's own static buffers, so that a replay does no work on the host.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from inkling_backend import env
from inkling_backend.attention import (
    AttentionSpec,
    LayerAttention,
    MixedRunner,
)
from inkling_backend.engines.sglang import inkling_model, metrics, versions
from inkling_backend.engines.sglang.centers import Centers
from inkling_backend.engines.sglang.flags import flags_of
from inkling_backend.engines.sglang.layer import layer_attention, window_of
from inkling_backend.engines.sglang.pools import RunnerPools
from inkling_backend.engines.sglang.requirements import (
    center_reasons,
    layer_reasons,
    sink_reason,
    takes_whole_prompts,
)
from inkling_backend.engines.sglang.speculation import tree_words
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import Query

logger = logging.getLogger(__name__)


class InklingAttnBackend(AttentionBackend):
    """Block-scaled attention over `InklingKVPool`, or over the engine's own pools for BF16."""

    # Lengths are read on the device; the host needs only the engine's lists of new and old tokens.
    needs_cpu_seq_lens = False
    # Plans have one row per request slot, so dummy batches must not hold more requests.
    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        config = model_runner.model_config
        self.device = torch.device(model_runner.device)
        # Both pools under these names are for the engine's wrapper of hybrid models.
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.kv_index_translator = getattr(model_runner, "kv_index_translator", None)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.pools = RunnerPools(model_runner)
        self.layout = self.pools.layout
        num_q_heads = config.num_attention_heads // versions.active_attention_tp_size()
        layers = [m for m in model_runner.model.modules() if isinstance(m, RadixAttention)]
        arguments = versions.active_server_args()
        flags = flags_of(arguments)
        several = versions.verified_tokens()
        reasons = layer_reasons(
            layers,
            self.layout,
            num_q_heads,
            whole_prompts=takes_whole_prompts(arguments),
            verifies=several > 1,
            trees=versions.verifies_trees(),
            centers=flags.centers_keys,
            window_slots=self.pools.layers_with_window_slots(layers),
            kept_window=model_runner.sliding_window_size,
        )
        if flags.centers_keys:
            reasons += center_reasons(
                sinks=versions.has_sinks(model_runner.model),
                two_pools=self.pools.window_size is not None,
            )
        if versions.attends_to_images_both_ways(model_runner.model, config):
            reasons.append("attention masks of images are not supported: unset --enable-multimodal")
        if reasons:
            raise UnsupportedError("this model", reasons)
        biased = versions.inkling_layers(config)
        if biased is not None:
            inkling_model.present(biased, flags)

        rows, max_context = self.req_to_token.shape
        spec = AttentionSpec(
            num_q_heads=num_q_heads,
            layout=self.layout,
            dtype=model_runner.dtype,
            quantize_query=flags.quantizes_query,
            relative_bias=biased is not None,
        )
        self.runner = MixedRunner(
            spec,
            self.pools.layouts,
            max_batch=rows,
            max_context=max_context,
            max_tokens=self.pools.size.tokens,
            max_q_len=several,
            maps_slots=self.pools.window_size is not None,
            device=self.device,
            fa4=versions.fa4() if env.asks_for_fa4() else None,
        )
        # Not when the first request comes: the engine ends a server that computes for too long.
        self.runner.prepare(map(layer_attention, layers))
        self._attention: dict[Any, LayerAttention] = {}
        # Of a batch: a plan for each pool; slots of its new tokens, and those in the second pool.
        self._plans: tuple[Any, ...] | None = None
        self._mapped_slots: tuple[torch.Tensor, torch.Tensor] | None = None
        self.pools.set_runner(self.runner)
        self._flags = flags
        self._centers: Centers | None = None
        if flags.centers_keys:
            self._centers = Centers(
                model_runner.token_to_kv_pool, model_runner.token_to_kv_pool_allocator
            )
        drafts = bool(model_runner.is_draft_worker)
        self._verify_mask = None
        # Of drafted trees; where a captured graph finds the words of the batch.
        self._tree: torch.Tensor | None = None
        if versions.verifies_trees():
            self._tree = torch.zeros(rows, several, dtype=torch.int64, device=self.device)
        if several > 1 and not drafts:
            self._verify_mask = versions.unread_verify_mask(rows, several, self.device)
        if versions.is_first_rank():
            facts = self._facts()
            self._log_start(layers, facts, "draft model, " if drafts else "")
            if not drafts:
                metrics.report(facts)

    def _facts(self) -> metrics.CacheFacts:
        spec, windows = self.runner.spec, self.pools.window_size
        own = self._flags.inkling_layer_recipes
        formats = {side.name for each in self.pools.layouts for side in each.formats}
        return metrics.CacheFacts(
            recipe=self.pools.recipe.name + (f" with layers {own}" if own else ""),
            query="mxfp8" if spec.quantize_query else str(spec.dtype).removeprefix("torch."),
            keys=self._flags.inkling_key_transform,
            nvfp4_scale=self._flags.inkling_nvfp4_scale if "nvfp4" in formats else "none",
            sink_tokens=self.layout.sink_tokens,
            kernels=self.runner.kernels,
            bytes_per_token=self.pools.bytes_per_token,
            pool_tokens=self.pools.size.tokens,
            window_pool_tokens=0 if windows is None else windows.tokens,
            pool_bytes=self.pools.nbytes,
            workspace_bytes=self.runner.workspace_bytes,
        )

    def _sizes(self) -> str:
        """How many layers have how many bytes of a token: ``28 layers of 216, 2 of 396``."""
        counts = Counter(layout.bytes_per_token for layout in self.pools.layouts).most_common()
        (size, layers), *others = counts
        return ", ".join([f"{layers} layers of {size}", *(f"{n} of {b}" for b, n in others)])

    def _log_start(self, layers: list[Any], facts: metrics.CacheFacts, whose: str) -> None:
        layout = self.layout
        logger.info(
            "inkling: %sKV cache recipe %s, %d bytes per token (%s), %d tokens in the "
            "pool, %.2fx the tokens of BF16, %s on %s, queries in %s%s%s%s, workspace %.1f MiB",
            whose,
            facts.recipe,
            facts.bytes_per_token,
            self._sizes(),
            facts.pool_tokens,
            layout.bytes_per_token_bf16 * self.pools.size.layers / facts.bytes_per_token,
            facts.kernels,
            self.device.type,
            facts.query,
            "" if facts.keys == "none" else f", keys under {facts.keys}",
            ", NVFP4 scales by fouroversix" if facts.nvfp4_scale == "fouroversix" else "",
            f", sink tokens {facts.sink_tokens}" if facts.sink_tokens else "",
            facts.workspace_bytes / 2**20,
        )
        windows = sum(window_of(layer) is not None for layer in layers)
        pool = self.pools.window_size
        if pool is not None:
            logger.info(
                "inkling: %d of %d layers have a sliding window and a pool of their own: %d bytes "
                "of a token (%d layers of %d), %d tokens in it",
                windows,
                len(layers),
                pool.layers * layout.bytes_per_token,
                pool.layers,
                layout.bytes_per_token,
                pool.tokens,
            )
        elif windows:
            logger.info(
                "inkling: %d of %d layers have a sliding window; their pages are kept for the "
                "whole context",
                windows,
                len(layers),
            )
        if any(layer.k_scale is not None or layer.v_scale is not None for layer in layers):
            logger.info(
                "inkling: the checkpoint's k_scale and v_scale are not needed and not used: every "
                "block of the cache carries its own scale"
            )

    # Metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan one eager forward."""
        mode = forward_batch.forward_mode
        if self._centers is not None:
            self._centers.begin()
        if mode.is_idle() or forward_batch.batch_size == 0:
            self._take(None)
        elif mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2():
            self._take_tree(forward_batch)
            self.plan_decode(forward_batch)
        else:
            new, total = _host_lengths(forward_batch)
            if self._centers is not None:
                self._centers.begin(new, total)
            plan = self.runner.plan_extend(
                self.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                _indptr(forward_batch.extend_seq_lens),
                new,
                total,
                slot_map=self.pools.slot_map,
            )
            self._take(plan)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The runner's buffers are graph-stable from the start; check that they are big enough."""
        if max_bs > self.req_to_token.shape[0]:
            raise UnsupportedError(
                f"CUDA graphs for {max_bs} requests",
                [f"the server runs at most {self.req_to_token.shape[0] - 1}: lower the graph size"],
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Planning is captured; what the graph cannot find by itself are drafted trees."""
        if not in_capture:
            self._take_tree(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan from the graph's static request rows and lengths; recorded and replayed."""
        if self._centers is not None:
            self._centers.begin()
        self.plan_decode(forward_batch)

    @property
    def verify_mask(self) -> Any:
        """Where the engine writes which drafted tokens see which: nobody reads it, of a chain."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Nothing to do: no plan depends on what was drafted."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the rows that pad a graph: one token of the engine's padding request."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Same as for CUDA graphs."""
        return 1

    def plan_decode(self, forward_batch: Any, ahead: int = 0) -> None:
        """Plan the same number of new tokens for each request: one, or those that are verified.

        Args:
            ahead: tokens of a draft, the new one included, that the batch's lengths do not count.
        """
        mode, lengths, q_len = forward_batch.forward_mode, forward_batch.seq_lens, 1
        tree = None
        if mode.is_target_verify():  # whose lengths count no drafted token
            q_len = ahead = self.runner.max_q_len
            tree = None if self._tree is None else self._tree[: forward_batch.batch_size]
        elif mode.is_draft_extend_v2():
            q_len = self.runner.max_q_len
        plan = self.runner.plan_decode(
            self.req_to_token,
            forward_batch.req_pool_indices,
            lengths + ahead if ahead else lengths,
            forward_batch.batch_size,
            q_len,
            slot_map=self.pools.slot_map,
            tree=tree,
        )
        self._take(plan)

    def _take_tree(self, forward_batch: Any) -> None:
        if self._tree is None or not forward_batch.forward_mode.is_target_verify():
            return
        batch = forward_batch.batch_size
        self._tree[:batch] = tree_words(
            forward_batch.spec_info.custom_mask,
            forward_batch.seq_lens[:batch],
            self.runner.max_q_len,
            whole=self.device.type != "cpu",  # the engine's choice
        )

    def _take(self, plan: Any) -> None:
        self._mapped_slots = None
        self._plans = None
        if plan is not None:
            self._plans = (plan, plan.mapped()) if self.runner.maps_slots else (plan,)

    def _new_slots(self, forward_batch: Any, pool: int) -> torch.Tensor:
        """Slots of a batch's new tokens in one of the pools.

        Those of the second are looked up once a batch, in a captured graph too.
        """
        slots = forward_batch.out_cache_loc
        if not pool:
            return slots
        if self._mapped_slots is None or self._mapped_slots[0] is not slots:
            slot_map = self.pools.slot_map
            assert slot_map is not None
            self._mapped_slots = slots, slot_map[slots]
        return self._mapped_slots[1]

    # Attention

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One new token per request: ``[B, query heads * Dk]`` -> ``[B, query heads * Dv]``."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Ragged new tokens: ``[T, query heads * Dk]`` -> ``[T, query heads * Dv]``."""
        out = self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        tokens = forward_batch.extend_num_tokens
        if tokens is not None and tokens < out.shape[0]:
            out[tokens:].zero_()
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        attention = self._attention_of(layer, kwargs.pop("sinks", None))
        layout, heads = self.layout, layer.tp_q_head_num
        bias = inkling_model.take_bias(kwargs)
        if bias is not None:
            attention = replace(attention, bias=bias)
        query = inkling_model.take_query(q, heads, layout.k_head_dim, kwargs)
        asked = (name for name, value in kwargs.items() if value is not None and value is not False)
        if unknown := sorted(asked):
            raise UnsupportedError(
                "this model", [f"its attention layers pass {', '.join(unknown)}: not supported"]
            )
        cache, dtype = self.pools.layer(layer.layer_id), self.runner.spec.dtype
        pool = int(self.pools.has_window_slots(layer.layer_id))
        q = q.view(-1, heads, layout.k_head_dim)
        if query is None:
            q = q.to(dtype)
            if not Query(q).has_dense_rows:
                q = q.contiguous()
        if save_kv_cache and k is not None and v is not None:
            k = k.view(-1, layout.num_kv_heads, layout.k_head_dim)
            if self._centers is not None:
                self._centers.see(layer.layer_id, cache, k)
            v = v.view(-1, layout.num_kv_heads, layout.v_head_dim)
            slots = self._new_slots(forward_batch, pool)[: k.shape[0]]
            if query is None:
                query = self.runner.store(cache, k, v, slots, q)
            else:
                self.runner.store(cache, k, v, slots)
        elif query is None:
            # K and V are in the cache already: an earlier layer's, or a fused writer's.
            query = self.runner.query(cache, q)
        out = q.new_empty(q.shape[0], heads, layout.v_head_dim, dtype=dtype)
        if self._plans is None:
            return out.zero_().flatten(1)
        self.runner.run(self._plans[pool], query, cache, out, attention)
        return out.flatten(1)

    def _attention_of(self, layer: Any, sinks: torch.Tensor | None) -> LayerAttention:
        known = self._attention.get(layer)
        if known is None or known.sinks is not sinks:
            if sinks is not None and self._centers is not None:
                raise UnsupportedError("this model", [sink_reason()])
            known = self._attention[layer] = replace(layer_attention(layer), sinks=sinks)
        return known


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    """``[B]`` lengths -> ``[B + 1]`` int32 row offsets."""
    out = lengths.new_zeros(lengths.shape[0] + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=out[1:])
    return out


def _host_lengths(forward_batch: Any) -> tuple[list[int], list[int]]:
    """New tokens and all tokens of each request of an extend, from the engine's lists."""
    new = list(forward_batch.extend_seq_lens_cpu)
    old = forward_batch.extend_prefix_lens_cpu
    return new, [a + b for a, b in zip(new, old, strict=True)]
