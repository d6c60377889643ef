"""The page about accuracy, from files of results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from inkling_backend.accuracy.measure import Row
from inkling_backend.accuracy.settings import TRANSFORMS
from inkling_backend.accuracy.synthetic import KINDS

# Goal: settings whose best counts, setting they are compared with, the most their KL may be of its.
GOALS = (
    ("mxfp8", "fp8_per_tensor", 0.45, 0.35),
    ("k_mxfp8_v_nvfp4", "fp8_per_tensor", 0.8, 0.65),
    ("nvfp4", "nvfp4", 0.45, 0.3),
    ("kvfp4", "kvfp4", 0.5, None),
)
# The most that an offset of K may raise the error of a setting with centering.
OFFSET_GOAL = 1.5


def page(model: dict[str, Any], made: dict[str, Any], layers: dict[str, Any]) -> str:
    """README.md of results on a model, on made data, and on the model with one layer in NVFP4."""
    rows = {row["setting"]: row for row in model["rows"]}
    kinds: dict[str, dict[str, Row]] = {}
    for row in made["rows"]:
        kind = row["model"].removeprefix("synthetic ")
        kinds.setdefault(row["setting"], {})[kind] = row
    first = model["rows"][0]
    host = ", ".join(f"{key} {value}" for key, value in model["host"].items())
    sections = [
        "# What the cache costs a model",
        "Written by `python -m integration.accuracy` from [results](results); measured by "
        "`inkling-backend accuracy`.",
        f"{first['model']} reads {first['tokens']} tokens of Python's language reference in "
        f"sequences of 1024, in float32 on the CPU ({host}); K and V after RoPE go through the "
        "package's own formats as the cache would hold them, each token's own included. One "
        "sequence goes before and is not counted: it is the first that the pool stores, and sets "
        "the centers. KL is of the next token's distribution against a BF16 cache, in nats, the "
        "mean over all positions; needles are the share of 10 numbers found at 5 depths of texts "
        "of 512 and 1024 tokens (every token of the number the model's first choice); the "
        "attention error is that of the output of a layer's head for the same inputs, over its "
        "size, the mean over layers and heads.",
        _model_table(rows),
        "![KL of every setting](kl.svg)",
        "![Error of the attention output per layer and head](attention-error.svg)",
        "Settings are a base and transforms. `mxfp8` has queries in MXFP8 too "
        "(`--inkling-query-dtype mxfp8`), no other base has. "
        "`+center` and `+rotate` (`--inkling-key-transform`), `+fouroversix` "
        "(`--inkling-nvfp4-scale`), `+sinksN` (`--inkling-sink-tokens`) and `+layers` "
        "(`--inkling-layer-recipes`) are served. KL of 4-bit settings moves by up to a tenth "
        "between runs that differ in a few ties of rounding: smaller differences between them say "
        "nothing.",
        "\n".join(f"- `+{name}`: {what}" for name, what in TRANSFORMS.items())
        + "\n- `+sinksN`: the first N tokens of a sequence in BF16, in pages of 128 tokens"
        + "\n- `+layers(...)`: single layers in another recipe",
        _costliest(layers["rows"]),
        "## Goals",
        "KL of the best setting of a base, over the KL of the setting compared with.",
        _goals(rows),
        _offset_goal(kinds),
        "## Data like those of hard models",
        "Error of the attention output over its size, for Q, K and V made of:",
        "\n".join(f"- {name}: {what}" for name, what in KINDS.items()),
        _made_table(kinds),
    ]
    return "\n\n".join(sections) + "\n"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    body = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


def _model_table(rows: dict[str, Row]) -> str:
    plain = rows["fp8_per_tensor"]["kl"]
    head = ("setting", "bits", "KL", "of FP8's", "perplexity", "top-1", "needles", "attention")
    return _table(
        head,
        (
            (
                f"`{name}`",
                f"{row['bits']:g}",
                f"{row['kl']:.5f}",
                f"{row['kl'] / plain:.2f}",
                f"{row['perplexity']:.3f}",
                f"{row['top1']:.3f}",
                f"{row['needle']['score']:.1f}",
                f"{row['attention_error']['mean']:.4f}",
            )
            for name, row in rows.items()
        ),
    )


def _costliest(rows: list[Row]) -> str:
    """Which layers cost most; row N is of layer N."""
    costs = [row["kl"] for row in rows]
    first = sorted(range(len(costs)), key=lambda layer: -costs[layer])[:4]
    named = ", ".join(f"layer {layer} {costs[layer]:.4f}" for layer in first)
    return (
        "What a layer costs, in NVFP4 alone (`bf16+layers(N:nvfp4)`, KL over the first sequence "
        f"that counts): {named}; the median {statistics.median(costs):.4f}."
    )


def _goals(rows: dict[str, Row]) -> str:
    lines = []
    for base, against, goal, stretch in GOALS:
        # Layers with more bits are no way to a base's goal at its bits.
        names = [name for name in rows if name.startswith(base) and "layers(" not in name]
        mine = [rows[name] for name in names]
        best = min(mine, key=lambda row: row["kl"])
        ratio = best["kl"] / rows[against]["kl"]
        met = "met" if ratio <= goal else "missed"
        if stretch is not None:
            met += ", stretch met" if ratio <= stretch else ", stretch missed"
        limits = f"{goal:g}" if stretch is None else f"{goal:g} ({stretch:g})"
        lines.append((f"`{best['setting']}`", f"`{against}`", f"**{ratio:.2f}**", limits, met))
    return _table(("best setting", "against", "ratio", "goal (stretch)", ""), lines)


def _offset_goal(kinds: dict[str, dict[str, Row]]) -> str:
    ratios = {
        name: row["offset"]["attention_error"] / row["plain"]["attention_error"]
        for name, row in kinds.items()
        if "+center" in name
    }
    worst = max(ratios, key=lambda name: ratios[name])
    met = "met" if ratios[worst] <= OFFSET_GOAL else "missed"
    return (
        f"With centering, an offset of K raises the error at most {ratios[worst]:.2f} times "
        f"(`{worst}`); the goal of {OFFSET_GOAL:g} times is {met} by "
        f"{sum(ratio <= OFFSET_GOAL for ratio in ratios.values())} of {len(ratios)} settings."
    )


def _made_table(kinds: dict[str, dict[str, Row]]) -> str:
    return _table(
        ("setting", *KINDS),
        (
            (f"`{name}`", *(f"{row[kind]['attention_error']:.4f}" for kind in KINDS))
            for name, row in kinds.items()
        ),
    )
