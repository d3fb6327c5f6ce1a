"""What the runner promises beside right tokens: isolation of rows, forks, padding, run-ahead, small uploads."""

from __future__ import annotations

import io
import random
import re
from collections import Counter

import numpy as np
import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import family_configs  # noqa: E402
import mlx.core as mx  # noqa: E402
import tiny_models  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from step_driver import DrivenSequence, StepDriver  # noqa: E402

from mlxbatch.errors import EngineError  # noqa: E402
from mlxbatch.execution import step_inputs  # noqa: E402
from mlxbatch.execution.attention.layout import DecodeLayout  # noqa: E402
from mlxbatch.execution.attention.reference import ReferenceAttention  # noqa: E402
from mlxbatch.execution.model_runner import ModelRunner  # noqa: E402
from mlxbatch.request import SamplingParams  # noqa: E402

POISON = 511  # the token whose embedding is not finite


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(length)]


def greedy(model, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def outcome(seq: DrivenSequence) -> tuple[list[int], list[object]]:
    return seq.tokens, list(seq.logprobs)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["mistral", "mixtral", "gpt_oss"])  # their heads are not their embeddings
def test_a_row_of_inf_and_nan_leaves_its_neighbours_bit_identical(name: str, poison: float) -> None:
    params = SamplingParams(temperature=0.0, logprobs=20, max_tokens=None)

    def run(value: float) -> StepDriver:
        model = family_configs.build(name) if name == "gpt_oss" else tiny_models.build(name)[0]
        model.model.embed_tokens.weight[POISON] = value
        driver = StepDriver(ModelRunner(model, block_size=4), num_slots=4)
        a, bad, b = (driver.add(prompt, params) for prompt in (prompt_of(11), prompt_of(9, 1), prompt_of(6, 2)))
        bad.tokens[4] = POISON
        driver.step(chunks=[(a, 7), (bad, 6)])
        driver.step(chunks=[(a, 4), (bad, 3), (b, 6)])
        for _ in range(10):
            driver.step(decode=[bad, a, b])
        driver.drain()
        # The next owner of the poisoned slot and of blocks that were written beside it
        heir = driver.add(prompt_of(13, 3), params, slot=bad.slot)
        driver.step(decode=[a], chunks=[(heir, 10)])
        driver.step(decode=[a], chunks=[(heir, 3)])
        for _ in range(6):
            driver.step(decode=[heir, b, a])
        driver.drain()
        return driver

    clean, dirty = run(0.25), run(poison)
    assert all(clean.sequences[1].finite) and not any(dirty.sequences[1].finite)
    for index in (0, 2, 3):
        assert outcome(dirty.sequences[index]) == outcome(clean.sequences[index])
        assert all(dirty.sequences[index].finite)


def test_forks_continue_from_their_parents_keys_and_values() -> None:
    model, _ = tiny_models.build("llama")
    driver = StepDriver(ModelRunner(model, block_size=8), num_slots=8)
    sampled = SamplingParams(temperature=1.0, max_tokens=None)
    parent = driver.add(prompt_of(13), sampled, seed=1)
    children = [driver.add([], sampled, seed=seed) for seed in (2, 3)]
    for child in children:
        child.num_prompt = parent.num_prompt
    driver.step(chunks=[(parent, 13)], forks=[(parent, child) for child in children])
    for _ in range(20):
        driver.step(decode=[children[0], parent, children[1]])
    driver.drain()
    answers = [seq.output for seq in (parent, *children)]
    assert len({tuple(answer) for answer in answers}) == 3
    for seed, answer in zip((1, 2, 3), answers, strict=True):
        alone = StepDriver(ModelRunner(model, block_size=8), num_slots=1)
        own = alone.add(prompt_of(13), sampled, seed=seed)
        alone.step(chunks=[(own, 13)])
        for _ in range(20):
            alone.step(decode=[own])
        alone.drain()
        assert own.output == answer


def test_padding_rows_change_nothing() -> None:
    model, _ = tiny_models.build("qwen3")
    prompts = [prompt_of(9), prompt_of(14, 1), prompt_of(5, 2)]
    expected = [greedy(model, prompt, 15) for prompt in prompts]
    runner = ModelRunner(model, block_size=4, row_sizes=(4, 8))
    driver = StepDriver(runner, num_slots=4)
    a, b, c = (driver.add(prompt) for prompt in prompts)
    driver.step(chunks=[(a, 9), (b, 10)])
    driver.step(decode=[a], chunks=[(b, 4), (c, 5)])
    while len(c.output) < 15:
        driver.step(decode=[a, b, c])
    driver.drain()
    assert [seq.output[:15] for seq in (a, b, c)] == expected
    scratch = np.array(runner.kv.layers[0].kv.tail_k)[4]
    assert scratch.any(), "padding rows must have run"


def test_slots_may_grow_while_sequences_run() -> None:
    model, _ = tiny_models.build("llama")
    prompts = [prompt_of(9), prompt_of(14, 1), prompt_of(5, 2)]
    driver = StepDriver(ModelRunner(model, block_size=4), num_slots=1)
    a = driver.add(prompts[0])
    driver.step(chunks=[(a, 9)])
    driver.step(decode=[a])
    driver.num_slots = 4
    b, c = driver.add(prompts[1]), driver.add(prompts[2])
    driver.step(decode=[a], chunks=[(b, 14), (c, 5)])
    for _ in range(10):
        driver.step(decode=[b, a, c])
    driver.drain()
    for seq, prompt in zip((a, b, c), prompts, strict=True):
        assert seq.output[:11] == greedy(model, prompt, 11)


class RecordingAttention(ReferenceAttention):
    def __init__(self) -> None:
        super().__init__()
        self.layouts: list[DecodeLayout] = []

    def decode(self, q, kv, layout, spec, sinks=None):
        self.layouts.append(layout)
        return super().decode(q, kv, layout, spec, sinks)


def test_steady_decode_steps_send_only_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny_models.build("llama")
    attention = RecordingAttention()
    driver = StepDriver(ModelRunner(model, block_size=16, attention=attention))
    a, b = driver.add(prompt_of(33)), driver.add(prompt_of(35, 1))
    driver.step(chunks=[(a, 33), (b, 35)])
    driver.step(decode=[a, b])
    attention.layouts.clear()
    uploads: list[int] = []
    array = mx.array

    def counted(value, *rest):
        if isinstance(value, np.ndarray):
            uploads.append(value.size)
        return array(value, *rest)

    monkeypatch.setattr(step_inputs.mx, "array", counted)
    for _ in range(8):
        driver.step(decode=[a, b])
    monkeypatch.undo()
    driver.drain()
    first = attention.layouts[0]
    for layout in attention.layouts:
        assert layout.tables is first.tables and layout.flushed is first.flushed
        assert layout.slots is first.slots and layout.stable is first.stable
    # Positions, lengths, where to write, where to read the tails and what they hide: none grows with the context.
    assert len(uploads) <= 5 * 8
    assert max(uploads) <= 2 * 2 * driver.runner.tail_len


def tail_addresses(runner: ModelRunner) -> list[int]:
    arrays = [array for layer in runner.kv.layers for array in (layer.kv.tail_k, layer.kv.tail_v)]
    return [np.asarray(array).__array_interface__["data"][0] for array in arrays]


@pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu), reason="a GPU's completion handlers hold tails, which are copied then"
)
def test_a_decode_step_writes_into_the_tails_where_they_are() -> None:
    """A copy of every tail at every step would come from anything that still holds the tails of the step before."""
    model, _ = tiny_models.build("llama")
    driver = StepDriver(ModelRunner(model, block_size=16))
    a, b = driver.add(prompt_of(33)), driver.add(prompt_of(35, 1))
    driver.step(chunks=[(a, 33), (b, 35)])
    driver.step(decode=[a, b])
    driver.drain()
    before = tail_addresses(driver.runner)
    for _ in range(4):
        driver.step(decode=[a, b])
    driver.drain()
    assert tail_addresses(driver.runner) == before


def operations_of_a_decode_step(rows: int, context: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Operations by kind in the graph that a steady decode step submits."""
    model, _ = tiny_models.build("llama")
    driver = StepDriver(ModelRunner(model, block_size=8), num_blocks=400, num_slots=8)
    sequences = [driver.add(prompt_of(context, seed)) for seed in range(rows)]
    driver.step(chunks=[(seq, context) for seq in sequences])
    driver.step(decode=sequences)
    found: Counter[str] = Counter()
    submit = mx.async_eval

    def counted(arrays: list[mx.array]) -> None:
        graph = io.StringIO()
        mx.export_to_dot(graph, *arrays)
        found.update(re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue()))
        submit(arrays)

    monkeypatch.setattr(mx, "async_eval", counted)
    driver.step(decode=sequences)
    monkeypatch.undo()
    driver.drain()
    return found


def test_a_decode_steps_graph_grows_with_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    few = operations_of_a_decode_step(2, 21, monkeypatch)
    assert few == operations_of_a_decode_step(8, 21, monkeypatch)
    assert few == operations_of_a_decode_step(8, 213, monkeypatch)
    model, _ = tiny_models.build("llama")
    graph = io.StringIO()
    logits = model(mx.zeros((2, 1), mx.int32), cache=make_prompt_cache(model))
    mx.export_to_dot(graph, logits)
    own = Counter(re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue()))
    layers = len(model.layers)
    assert few["AsType"] <= own["AsType"] + 2, "no casts but those of the model, and of the sampled ids"
    assert few.total() - own.total() <= 25 * layers + 20


def test_ids_in_flight_need_a_step_that_sampled() -> None:
    model, _ = tiny_models.build("llama")
    driver = StepDriver(ModelRunner(model, block_size=4))
    a = driver.add(prompt_of(5))
    driver.step(chunks=[(a, 3)])
    a.tokens[3] = -1
    with pytest.raises(EngineError, match="sampled none"):
        driver.step(decode=[a])
