"""Tables of the documents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from inkling_backend.bench.cases import short
from inkling_backend.bench.compare import label
from inkling_backend.bench.results import BF16_PEERS, Row, best_bf16_peer, read
from inkling_backend.formats import RECIPES, get_recipe
from inkling_backend.formats.layout import CacheLayout
from integration.pages import results

# Order of the recipes, and when to choose each; {} is a figure of the accuracy results.
CHOICE = {
    "bf16": "as the control",
    "mxfp8": "always; {mxfp8_q_mxfp8:.2f} with `--inkling-query-dtype mxfp8`",
    "mxfp8-nvfp4": "for more context at about the same cost",
    "nvfp4": "where memory decides, after measuring your model; "
    "{nvfp4+center+rotate+fouroversix+sinks1:.2f} with "
    "[three flags and an eighth of a bit](#the-first-tokens-in-bf16)",
    "kvfp4": "where E8M0 scales are wanted",
    "mxfp4": "where it must be OCP's MXFP4, with `--inkling-key-transform rotate`",
}
assert CHOICE.keys() == RECIPES.keys()
_NOTES = {"mxfp8": " (default)", "mxfp8-nvfp4": " (K, V)"}
_KV_HEADS, _HEAD_DIM = 8, 128
# The shape that the decision is made by.
SHAPE = (64, 8192)
_LIBRARIES = {"flashinfer_bf16": "FlashInfer", "fa3_bf16": "FA3", "torch_bf16": "torch"}


def table(head: Iterable[str], lines: Iterable[Iterable[str]], right: int | None = None) -> str:
    """A Markdown table; columns from ``right`` on are aligned to the right."""
    head = list(head)
    rules = ["---" if right is None or i < right else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rules, *lines))


def layout_of(recipe: str) -> CacheLayout:
    """Pages of a model with 8 KV heads of 128, as Llama 3.1 8B has."""
    found = get_recipe(recipe)
    return CacheLayout(found.k, found.v, _KV_HEADS, _HEAD_DIM, _HEAD_DIM)


def recipes() -> str:
    """The decision table: size, speed, accuracy, when."""
    path = results.newest()["decode"]
    content, costs = read(path), results.costs()
    measured = results.rows_at(content, *SHAPE)
    lines = []
    for name, choice in CHOICE.items():
        size, plain = layout_of(name).bytes_per_token, layout_of("bf16").bytes_per_token
        bits = size * 8 / (2 * _KV_HEADS * _HEAD_DIM)
        lines.append(
            (
                f"`{name}`{_NOTES.get(name, '')}",
                f"{bits:g}",
                f"{size}",
                f"{plain / size:.2f}x",
                _faster(measured.get(name)),
                f"{costs[name]:.2f}" if costs[name] else "0",
                choice.format(**costs),
            )
        )
    quantized = "mxfp8" in measured and measured["mxfp8"].get("query", "mxfp8") == "mxfp8"
    queries = ", `mxfp8` with queries in MXFP8" if quantized else ""
    head = ("recipe", "bits", "bytes¹", "tokens", "decode²", "KL³", "choose it")
    batch, context = SHAPE
    notes = (
        f"¹ Of a token in a layer, {_KV_HEADS} KV heads of {_HEAD_DIM}. ² {batch} requests of "
        f"{short(context)} tokens on an {content['host']['gpu']}, times faster than "
        f"{_peers(content)}{queries} ([all results](integration/benchmarks/README.md)). ³ KL "
        "divergence from a BF16 cache, as a multiple of that of an FP8 cache with one scale per "
        "tensor; [SmolLM2-135M](integration/accuracy/README.md), a small model that "
        "notices every bit."
    )
    if any("-" in line for line in lines):
        notes += " -: not measured yet."
    return f"{table(head, lines)}\n\n{_fill(notes)}"


def _fill(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _quantized(content: dict[str, Any]) -> list[tuple[float, str, str]]:
    """(times faster than the peer, recipe, shape) of every quantized row, slowest first."""
    return sorted(
        (peer / row["us"], row["format"], f"{row['batch']} x {short(row['context'])}")
        for row in content["rows"]
        if row["format"] != "bf16" and "us" in row and (peer := best_bf16_peer(row)) is not None
    )


def speeds() -> str:
    """Where decode is fastest and slowest, and where it does not pay."""
    content = read(results.newest()["decode"])
    rows, gpu = _quantized(content), content["host"]["gpu"]
    if not rows:
        return f"Decode on an {gpu}: no other BF16 attention was measured beside it."
    (low, slow, slow_at), (high, fast, fast_at) = rows[0], rows[-1]
    text = (
        f"Decode on an {gpu}, batch x context, against {_peers(content)} in the "
        f"same process: from {high:.2f}x (`{fast}`, {fast_at}) to {low:.2f}x (`{slow}`, {slow_at})."
    )
    # Shapes keep the order of the file.
    behind = {shape for ratio, _, shape in rows if ratio < 1}
    shapes = dict.fromkeys(f"{row['batch']} x {short(row['context'])}" for row in content["rows"])
    if behind:
        named = ", ".join(shape for shape in shapes if shape in behind)
        text += f" At {named} a recipe is slower than BF16: choose by memory there."
    return _fill(text)


def decode_table() -> str:
    """Decode at every shape of the newest file, times faster than the best BF16 peer."""
    content = read(results.newest()["decode"])
    shapes = dict.fromkeys((row["batch"], row["context"]) for row in content["rows"])
    lines = []
    for batch, context in shapes:
        rows = results.rows_at(content, batch, context)
        peers = [us for row in rows.values() if (us := best_bf16_peer(row)) is not None]
        lines.append(
            (
                f"{batch} x {short(context)}",
                f"{peers[0]:.0f}" if peers else "-",
                *(_faster(rows.get(name)) for name in CHOICE),
            )
        )
    head = ("batch x context", "peer, us", *(f"`{name}`" for name in CHOICE))
    heads = content["rows"][0]
    return (
        f"{heads['q_heads']} query and {heads['kv_heads']} KV heads, head_dim {heads['head_dim']}: "
        f"times faster than {_peers(content)}, measured in the same process; microseconds are of "
        f"one layer.\n\n{table(head, lines, right=1)}"
    )


def start() -> str:
    """The line that a server logs at its start."""
    line, gpu = results.start_line("mxfp8")
    text = (
        "At its start the server logs one line that says what it does (here for SmolLM2-135M on an "
        f"{gpu}):\n\n```text\n{_fill(line)}\n```"
    )
    if "queries in mxfp8" in line:
        text += "\n\n" + _fill(
            "Queries are in MXFP8 with `--inkling-query-dtype mxfp8`, in the model's dtype without."
        )
    return text


def benchmarks() -> str:
    """The page of all newest results."""
    sections = [
        "# Speed",
        "Written by `make pages` from the newest [results](results) of each kind. `python -m "
        "integration.gpu.measure` measures them all, by `inkling-backend bench`. Files are named "
        "DATE-GPU-KIND.json; the newest by the date in it counts. "
        "What limits the kernels, and what was tried: [notes](notes.md).",
    ]
    for kind, path in results.newest().items():
        content = read(path)
        lines = [_result(row) for row in content["rows"]]
        head = ("", "us", "best BF16 peer", "faster", "of copy speed")
        sections += [
            f"## {kind}",
            f"{_host(content)}, commit {content['commit'][:7]} ([file](results/{path.name})).",
            *([decode_table()] if kind == "decode" else []),
            *(f"![{name}](pictures/{name})" for name in _pictures(kind, content)),
            table(head, lines, right=1),
        ]
    return "\n\n".join(sections) + "\n"


def _pictures(kind: str, content: dict[str, Any]) -> list[str]:
    if kind not in results.DRAWN:
        return []
    folder = results.RESULTS.parent / "pictures"
    return sorted(path.name for path in folder.glob(f"{content['rows'][0]['op']}-*.svg"))


def _result(row: Row) -> tuple[str, ...]:
    peer, us = best_bf16_peer(row), row.get("us")
    return (
        label(row),
        f"{us:.1f}" if us else "failed",
        f"{peer:.1f}" if peer else "",
        _faster(row) if us and peer else "",
        f"{row['copy_us'] / us:.2f}" if us and "copy_us" in row else "",
    )


def _faster(row: Row | None) -> str:
    peer = None if row is None else best_bf16_peer(row)
    return "-" if row is None or peer is None else f"{peer / row['us']:.2f}x"


def _peers(content: dict[str, Any]) -> str:
    """Whoever was the best BF16 peer in a file, with versions."""
    best = set()
    for row in content["rows"]:
        known = {name: row["peers"][name] for name in BF16_PEERS if name in row.get("peers", {})}
        if known:
            best.add(min(known, key=lambda name: known[name]))
    names = [_LIBRARIES[name] for name in BF16_PEERS if name in best]
    return f"{' or '.join(names) or 'a peer'} in BF16"


def _host(content: dict[str, Any]) -> str:
    host = content["host"]
    versions = (f"{key} {host[key]}" for key in ("torch", "triton", "flashinfer") if key in host)
    return f"{host['gpu']}, {', '.join(versions)}, {content['date'][:10]}"
