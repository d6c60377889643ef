"""Ask an engine that speculates, and let it judge what it said.

Greedy tokens with and without drafts part where two are as likely but for rounding. So every token
is compared with the likeliest ones after those before it, which the engine computes as one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from integration.compare import TOP
from integration.engine import RealEngine


@dataclass(frozen=True)
class Drafted:
    """Answers with drafts.

    Attributes:
        tokens: of each prompt.
        accepted: share of the drafted tokens that were right, mean of the prompts.
    """

    tokens: list[list[int]]
    accepted: float


def speculate(engine: RealEngine, prompts: Sequence[list[int]], count: int) -> Drafted:
    """Exactly ``count`` greedy tokens after each prompt, as one batch."""
    answers = engine.generate(
        input_ids=list(prompts), sampling_params={"max_new_tokens": count, "ignore_eos": True}
    )
    rates = [answer["meta_info"]["spec_accept_rate"] for answer in answers]
    return Drafted([answer["output_ids"] for answer in answers], sum(rates) / len(rates))


def gaps(
    engine: RealEngine, prompts: Sequence[list[int]], tokens: Sequence[list[int]]
) -> list[float]:
    """Of each answer the most nats that one of its tokens is behind the likeliest in its place."""
    engine.call("flush_cache")
    judged = engine.generate(
        input_ids=[prompt + said for prompt, said in zip(prompts, tokens, strict=True)],
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=[len(prompt) - 1 for prompt in prompts],
        top_logprobs_num=TOP,
    )
    found = []
    for said, answer in zip(tokens, judged, strict=True):
        # The first is of the prompt's last token, and the engine says nothing of it.
        own = answer["meta_info"]["input_token_logprobs"][1:]
        tops = answer["meta_info"]["input_top_logprobs"][1:]
        assert [token for _, token, *_ in own] == said
        behind = [top[0][0] - each[0] for each, top in zip(own, tops, strict=True)]
        found.append(max(behind))
    return found
