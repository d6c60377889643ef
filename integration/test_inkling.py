"""The Inkling model through the real engine, against transformers' own implementation in float32.

On a CPU with stand-ins for the engine's short convolutions (`inkling_tiny`); on a GPU as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.compare import TOP
from integration.engine import RealEngine
from integration.inkling_reference import reference
from integration.inkling_tiny import DUMMY, EXTENT, TEXT, VOCAB, WINDOW, config, plugin
from integration.launch import options
from integration.tiny_models import write_config

# The last passes the window, the extent of the biases, and the floor of the long-context scale; in
# chunks it is begun three times.
PROMPTS = [[(7 * i * i + 3 * i) % (VOCAB - 12) + 5 for i in range(n)] for n in (5, 70, 300)]
CHUNK, NEW_TOKENS = 128, 40
# Mean distance of log-probabilities from the float32 ones, in nats: some twice what transformers
# itself shows in bfloat16 (0.036 at most), and what these caches add to it.
NEAR = {"bf16": 0.07, "mxfp8": 0.12, "nvfp4": 0.5}


def _start(folder: Path, recipe: str, **keywords: Any) -> RealEngine:
    model = write_config(folder / "model", config())
    pools: dict[str, Any] = {"max_total_tokens": 16384, "swa_full_tokens_ratio": 0.5}
    chosen = options(model, recipe, **DUMMY, **pools, chunked_prefill_size=CHUNK, **keywords)
    return RealEngine(chosen, env=plugin(folder / "plugin"))


@pytest.fixture(scope="module", params=list(NEAR))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, RealEngine]]:
    recipe = request.param
    with _start(tmp_path_factory.mktemp(recipe), recipe) as started:
        yield recipe, started


def _answers(engine: RealEngine) -> list[dict[str, Any]]:
    """Answers to the prompts as one batch, with probabilities of prompts and answers."""
    engine.call("flush_cache")
    return engine.generate(
        input_ids=PROMPTS,
        sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=TOP,
    )


def _probabilities(network: Any, prompt: list[int], said: list[int]) -> Any:
    """Log-probabilities that a model of transformers gives the tokens behind the first."""
    import torch

    tokens = torch.tensor([prompt + said])
    with torch.no_grad():
        logits = network(tokens).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def _apart(found: list[Any], wanted: Any) -> float:
    """Mean distance of an engine's log-probabilities from those wanted."""
    import torch

    return float((torch.tensor([each[0] for each in found]) - wanted).abs().mean())


def test_prefill_and_decode(engine: tuple[str, RealEngine]) -> None:
    recipe, started = engine
    whole = reference()
    # What is said must depend on what is tested.
    without_bias, without_scale = reference(), reference(log_scaling_n_floor=None)
    for name, weight in without_bias.named_parameters():
        if name.endswith("rel_logits_proj.proj"):
            weight.data.zero_()
    assert len(PROMPTS[-1]) > max(WINDOW, EXTENT, int(str(TEXT["log_scaling_n_floor"])))
    for prompt, answer in zip(PROMPTS, _answers(started), strict=True):
        said, facts = answer["output_ids"], answer["meta_info"]
        wanted = _probabilities(whole, prompt, said)
        prefill, decode = facts["input_token_logprobs"][1:], facts["output_token_logprobs"]
        cut = len(prompt) - 1
        assert _apart(prefill, wanted[:cut]) <= NEAR[recipe]
        assert _apart(decode, wanted[cut:]) <= NEAR[recipe]
        other = _probabilities(without_bias, prompt, said)
        assert _apart(decode, other[cut:]) > 4 * NEAR["mxfp8"]
    other = _probabilities(without_scale, prompt, said)
    assert _apart(decode, other[cut:]) > 2 * NEAR["bf16"]


def test_a_hit_in_the_prefix_cache_says_the_same(engine: tuple[str, RealEngine]) -> None:
    _, started = engine
    first = _answers(started)[-1]
    (again,) = started.generate(
        input_ids=[PROMPTS[-1]],
        sampling_params={"max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        return_logprob=True,
    )
    assert again["meta_info"]["cached_tokens"] == 256
    assert again["output_ids"] == first["output_ids"]


def test_the_log_says_what_serves(engine: tuple[str, RealEngine]) -> None:
    recipe, started = engine
    assert f"KV cache recipe {recipe}," in started.log
    assert "2 of 4 layers have a sliding window and a pool of their own" in started.log
