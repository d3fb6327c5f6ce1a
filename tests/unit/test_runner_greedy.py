"""Hand-made step plans on tiny models give the tokens of mlx-lm, one sequence at a time."""

from __future__ import annotations

import random

import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import mlx.core as mx  # noqa: E402
import tiny_models  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from mlxbatch.execution.model_runner import ModelRunner  # noqa: E402

NEW_TOKENS = 24
LENGTHS = (21, 9, 40, 1, 16)


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]


def mlx_lm_tokens(model, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


@pytest.mark.parametrize(
    ("name", "block_size"),
    [*((name, 4) for name in sorted(tiny_models.CONFIGS)), ("llama", 8), ("gemma3_text", 16), ("llama", 32)],
)
def test_ragged_chunks_and_decodes_give_the_tokens_of_mlx_lm(name: str, block_size: int) -> None:
    model, _ = tiny_models.build(name)
    prompts = prompts_of(LENGTHS)
    expected = [mlx_lm_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    driver = StepDriver(ModelRunner(model, block_size=block_size))
    a, b, c, d, e = (driver.add(prompt) for prompt in prompts)
    driver.step(chunks=[(a, 13)])
    driver.step(chunks=[(a, 8), (b, 9), (c, 7)])
    driver.step(decode=[a, b], chunks=[(c, 2), (d, 1)])
    driver.step(decode=[b, d, a], chunks=[(c, 31), (e, 16)])
    running = [a, b, c, d, e]
    while running:
        driver.step(decode=running)
        running = [seq for seq in running if len(seq.output) < NEW_TOKENS]
    driver.drain()
    assert [seq.output[:NEW_TOKENS] for seq in driver.sequences] == expected
