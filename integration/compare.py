"""Compare what two engines say when they are allowed to round differently.

Greedy tokens of two implementations part at the first near tie, which says nothing. The
probabilities of every step up to there do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integration.engine import RealEngine

TOP = 8
# The engine computes logits in bfloat16, and those of the tiny models stay below 4, where one unit
# in the last place is 2**-6: four of them.
TOLERANCE = 4 * 2**-6


@dataclass(frozen=True)
class Step:
    """One generated token, and the log-probabilities of the likeliest ones, where they came."""

    token: int
    top: dict[int, float]


def generate(engine: RealEngine, input_ids: list[list[int]], count: int) -> list[list[Step]]:
    """The steps of exactly ``count`` greedy tokens after each prompt, as one batch."""
    answers = engine.generate(
        input_ids=input_ids,
        sampling_params={"max_new_tokens": count, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=TOP,
    )
    return [steps_of(answer) for answer in answers]


def steps_of(answer: dict[str, Any]) -> list[Step]:
    """The steps of one answer of the engine that was asked for `TOP` log-probabilities."""
    tokens, tops = answer["output_ids"], answer["meta_info"]["output_top_logprobs"]
    if retracted(answer):
        # Seen of SGLang 0.5.17: fewer than tokens. By its sources the first is lost where it
        # retracts a request before its first token.
        tops = [()] * (len(tokens) - len(tops)) + tops
    return [
        Step(token, {each: logprob for logprob, each, *_ in top})
        for token, top in zip(tokens, tops, strict=True)
    ]


def retracted(answer: dict[str, Any]) -> bool:
    """Whether the engine took the pages of this request away, and computed it anew."""
    return answer["meta_info"].get("num_retractions", 0) > 0


def generate_by_transformers(
    model: Path, input_ids: list[list[int]], count: int, **changes: object
) -> list[list[Step]]:
    """The same steps by the model's own implementation in transformers, in plain torch.

    Args:
        changes: fields of the model's configuration to replace.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model, **changes)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=torch.bfloat16, attn_implementation="eager"
    )
    answers = []
    for prompt in input_ids:
        tokens, steps = list(prompt), []
        for _ in range(count):
            with torch.no_grad():
                logits = network(torch.tensor([tokens])).logits[0, -1].float()
            top = logits.log_softmax(-1).topk(TOP)
            likeliest = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            steps.append(Step(int(top.indices[0]), likeliest))
            tokens.append(steps[-1].token)
        answers.append(steps)
    return answers


def disagreements(
    one: list[list[Step]], other: list[list[Step]], tolerance: float = TOLERANCE
) -> list[str]:
    """Where two engines differ by more than rounding (empty if they agree)."""
    found = []
    for i, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        if len(ours) != len(theirs):
            found.append(f"prompt {i}: {len(ours)} tokens against {len(theirs)}")
        for j, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if not (a.top and b.top) and a.token == b.token:
                continue
            both = a.top.keys() & b.top.keys()
            gap = max((abs(a.top[t] - b.top[t]) for t in both), default=float("inf"))
            if gap > tolerance or not {a.token, b.token} <= both:
                found.append(f"prompt {i}, token {j}: {a} against {b}")
                break
            if a.token != b.token:  # a tie within the tolerance; what follows cannot be compared
                break
    return found
