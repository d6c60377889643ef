"""What speculation needs of the engine's compiled CPU kernels: stand-ins in plain torch.

A plugin, put on the module path of one test's engine. `sgl_kernel_standin` lets the engine import
these names and nothing more; here the few that drafting and verifying call get bodies with the
contract of the engine's Triton kernels beside them. They are bookkeeping of tokens and slots;
attention, and what is drafted and said, is up to the engine and to us.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from integration.driverless import STANDIN
from integration.probe import write_plugin

_DRAFT = "sglang.kernels.ops.speculative"
_CACHE = "sglang.kernels.ops.kvcache.cache_move"
_SLOTS = "sglang.srt.mem_cache.allocation"
_QLEN_ONLY = 1


def draft_ops(folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables of an engine that can speculate; ``folder`` is for the plugin.

    Args:
        env: of another plugin, to which this one is added.
    """
    write_plugin(folder, "integration-draft-ops", "integration.draft_ops:register")
    paths = [str(folder), str(STANDIN), (env or {}).get("PYTHONPATH", "")]
    return dict(env or {}) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def register() -> None:
    """Entry point: put the bodies where the engine's modules have imported the names."""
    import torch

    bodies: dict[str, dict[str, Callable[..., None]]] = {
        f"{_DRAFT}.spec_tree": {
            "sgl_build_tree_kernel_efficient_cpu": build_tree,
            "sgl_verify_tree_greedy_cpu": verify_tree_greedy,
        },
        f"{_DRAFT}.cache_locs": {
            "assign_draft_cache_locs_contiguous_cpu": assign_draft_cache_locs,
            "assign_extend_cache_locs_cpu": assign_extend_cache_locs,
        },
        f"{_DRAFT}.eagle": {
            "fill_bonus_tokens_cpu": fill_bonus_tokens,
            "fill_accept_out_cache_loc_cpu": fill_accepted_slots,
        },
        f"{_DRAFT}.reconstruct_tree": {"reconstruct_indices_from_tree_mask": links_of_tree},
        _CACHE: {"copy_all_layer_kv_cache_cpu": copy_rows},
        _SLOTS: {"assign_req_to_token_pool_cpu": assign_slots},
    }
    for name, functions in bodies.items():
        module = importlib.import_module(name)
        for function, body in functions.items():
            assert hasattr(module, function), f"{module.__name__} has no {function}"
            setattr(module, function, torch.no_grad()(body))


def build_tree(
    parents,
    selected,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    tokens,
    mask_mode,
):
    """Fills mask, positions and links of drafted trees, the verified token being their root."""
    assert int(mask_mode) == _QLEN_ONLY, mask_mode
    mask = tree_mask.view(-1, tokens, tokens)
    mask.zero_()
    where = positions.view(-1, tokens)
    for request, length in enumerate(seq_lens.tolist()):
        chosen = selected[request].tolist()
        parent = [-1] * tokens
        for token in range(1, tokens):
            row = chosen[token - 1] // topk
            parent[token] = 0 if row == 0 else chosen.index(int(parents[request, row])) + 1
        first_child: dict[int, int] = {}
        for token in range(tokens - 1, 0, -1):
            sibling = first_child.get(parent[token])
            if sibling is not None:
                retrieve_next_sibling[request, token] = sibling
            first_child[parent[token]] = token
            retrieve_next_token[request, parent[token]] = token
        for token in range(tokens):
            retrieve_index[request, token] = request * tokens + token
            seen = token
            mask[request, token, 0] = True
            steps = 0
            while seen > 0:
                mask[request, token, seen] = True
                seen = parent[seen]
                steps += 1
            where[request, token] = length + steps


def links_of_tree(
    tree_mask, seq_lens, positions, retrieve_index, next_token, next_sibling, batch, tokens
):
    """Positions and links of trees of which the mask is known."""
    for request, mask in enumerate(tree_mask.view(batch, tokens, tokens).tolist()):
        seen = [[j for j in range(i) if mask[i][j]] for i in range(tokens)]
        parent = [max(each, default=-1) for each in seen]
        for i in range(tokens):
            positions[request * tokens + i] = int(seq_lens[request]) + len(seen[i])
            retrieve_index[request, i] = request * tokens + i
            later = range(i + 1, tokens)
            next_token[request, i] = next((k for k in later if i in seen[k]), -1)
            siblings = (k for k in later if parent[k] == parent[i] >= 0)
            next_sibling[request, i] = next(siblings, -1)


def verify_tree_greedy(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follows the drafted tokens that the model itself would have said."""
    flat = target_predict.flatten()
    for request in range(candidates.shape[0]):
        last = int(retrive_index[request, 0])
        accept_index[request, 0] = last
        accepted, node = 0, 0
        for _ in range(1, accept_index.shape[1]):
            node = int(retrive_next_token[request, node])
            while node != -1 and candidates[request, node] != flat[last]:
                node = int(retrive_next_sibling[request, node])
            if node == -1:
                break
            predicts[last] = flat[last]
            accepted += 1
            last = int(retrive_index[request, node])
            accept_index[request, accepted] = last
        accept_token_num[request] = accepted
        predicts[last] = flat[last]


def assign_draft_cache_locs(rows, table, seq_lens, out, width, topk, steps):
    """Slots of the tokens after each request's own."""
    slots = out.view(-1, topk * steps)
    for request, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        slots[request] = table[row, length : length + topk * steps]


def assign_extend_cache_locs(rows, table, starts, ends, out, width):
    """Slots of some tokens of each request, one request after the other."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        out[first : first + end - start] = table[row, start:end]
        first += end - start


def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, stride):
    """The last token of each request that was accepted or corrected."""
    for request, length in enumerate(accept_lens.tolist()):
        bonus_tokens[request] = accept_tokens.flatten()[stride * request + length - 1]


def fill_accepted_slots(accept_index, slots, accepted):
    """Slots of the accepted tokens, all requests' together."""
    index = accept_index.flatten()
    chosen = slots[index[index >= 0].long()]
    accepted[: len(chosen)] = chosen


def assign_slots(rows, table, starts, ends, slots, width):
    """Writes the slots of new tokens into each request's row."""
    first = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[first : first + end - start]
        first += end - start


def copy_rows(addresses, strides, targets, sources):
    """Copies rows of K and V within buffers that are known by their addresses."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + each * stride, stride) for each in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + target * stride, row, stride)
