"""One family of every kind of attention and recurrence: logits of ragged steps equal mlx-lm's own."""

from __future__ import annotations

import random

import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import family_configs  # noqa: E402
import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import tiny_models  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from step_driver import DrivenSequence, StepDriver  # noqa: E402

from mlxbatch.errors import ModelError  # noqa: E402
from mlxbatch.execution.model_runner import ModelRunner  # noqa: E402
from mlxbatch.execution.modes import Mode  # noqa: E402
from mlxbatch.request import SamplingParams  # noqa: E402

PARAMS = SamplingParams(temperature=0.0, logprobs=20, max_tokens=None)
PACKED = ("gemma3n", "deepseek_v3", "gpt_oss", "mimo_v2_flash")
SEGMENTED = ("qwen3_next", "lfm2", "falcon_h1", "mamba2", "recurrent_gemma")


def run(model: nn.Module, block_size: int = 4) -> tuple[ModelRunner, list[DrivenSequence]]:
    """Chunks that start anywhere, decode rows in changing order, beyond the windows."""
    runner = ModelRunner(model, block_size=block_size)
    driver = StepDriver(runner)
    rng = random.Random(0)
    a, b, c = (driver.add([rng.randrange(3, 500) for _ in range(n)], PARAMS) for n in (21, 9, 13))
    driver.step(chunks=[(a, 10)])
    driver.step(chunks=[(a, 11), (b, 9)])
    driver.step(decode=[a, b], chunks=[(c, 6)])
    driver.step(decode=[b, a], chunks=[(c, 7)])
    for _ in range(8):
        driver.step(decode=[c, a, b])
    driver.step(decode=[a])
    driver.step(decode=[b, c])
    driver.drain()
    return runner, driver.sequences


def largest_difference(model: nn.Module, sequences: list[DrivenSequence], shift: int = 0) -> float:
    """Between the log-probabilities found and those of mlx-lm for the same tokens, one sequence at a time.
    `shift` compares with the wrong position, which must differ."""
    worst = 0.0
    for seq in sequences:
        cache = make_prompt_cache(model)
        logits = [model(mx.array([seq.tokens[: seq.num_prompt]]), cache=cache)[0, -1]]
        for token in seq.output[:-1]:
            logits.append(model(mx.array([[token]]), cache=cache)[0, -1])
        assert len(logits) == len(seq.logprobs)
        for found, own in zip(seq.logprobs, logits[shift:], strict=False):
            assert found is not None
            own = own.astype(mx.float32)
            reference = (own - mx.logsumexp(own)).tolist()
            worst = max(worst, *(abs(reference[token] - value) for token, value in found.top))
    return worst


@pytest.mark.parametrize("name", [*PACKED, *SEGMENTED])
def test_logits_equal_mlx_lm(name: str) -> None:
    model = family_configs.build(name)
    runner, sequences = run(model)
    assert runner.profile.mode is (Mode.SEGMENTED if name in SEGMENTED else Mode.PACKED)
    assert largest_difference(model, sequences) < 1e-4
    assert largest_difference(model, sequences, shift=1) > 0.02


def test_groups_follow_what_layers_store_and_see() -> None:
    groups = {name: ModelRunner(family_configs.build(name), block_size=4).groups for name in PACKED}
    kinds = {name: [(g.name, g.window, g.layers) for g in found] for name, found in groups.items()}
    assert kinds["gemma3n"] == [("window-8", 8, (0, 2)), ("full", None, (1, 3))]
    assert kinds["deepseek_v3"] == [("latent", None, (0, 1, 2, 3))]
    assert kinds["mimo_v2_flash"] == [("full", None, (0, 2)), ("window-8", 8, (1, 3))]
    # float32: 2 heads of 16 and 12 numbers; 4 heads of 16 and 12 numbers
    assert [g.bytes_per_block for g in groups["mimo_v2_flash"]] == [2 * 4 * 2 * 28 * 4, 2 * 4 * 4 * 28 * 4]


def test_models_that_attend_by_hand_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="gemma2"):
        ModelRunner(family_configs.build("gemma2"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", mx.float16), ("llama", mx.bfloat16), ("gemma3_text", mx.bfloat16)],
    ids=["llama-float16", "llama-bfloat16", "gemma3-bfloat16"],
)
def test_half_precision_stays_within_its_rounding(name: str, dtype: mx.Dtype) -> None:
    model, _ = tiny_models.build(name)
    model.set_dtype(dtype)
    runner, sequences = run(model)
    assert all(shape.k_dtype == dtype for shape in runner.profile.shapes)
    assert largest_difference(model, sequences) < (0.05 if dtype == mx.float16 else 0.4)
