"""Sampling against definitions in numpy: what may be drawn, how often, and that rows do not know each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import mlx.core as mx  # noqa: E402

from mlxbatch.execution.sampling import Sampler  # noqa: E402
from mlxbatch.request import SamplingParams  # noqa: E402
from mlxbatch.scheduling.plan import SampleRow, StepResult  # noqa: E402

VOCAB = 40


def row_of(
    params: SamplingParams,
    *,
    seq_id: int = 0,
    slot: int = 0,
    position: int = 5,
    seed: int = 0,
    suppress: tuple[int, ...] = (),
    num_prompt: int = 3,
    history: list[int] | None = None,
) -> SampleRow:
    return SampleRow(seq_id, slot, 0, position, params, seed, suppress, num_prompt, history or [1, 2, 3])


def sample(logits: np.ndarray, rows: list[SampleRow], inputs: list[int] | None = None) -> StepResult:
    tokens = mx.array(inputs if inputs is not None else [0] * len(rows))
    samples = Sampler().sample(mx.array(logits), rows, tokens, range(len(rows)))
    mx.async_eval(samples.arrays())
    return samples.read()


def random_logits(rows: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, VOCAB)) * scale).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_takes_the_largest_logit(dtype: mx.Dtype) -> None:
    logits = mx.array(random_logits(6)).astype(dtype)
    samples = Sampler().sample(logits, [row_of(GREEDY)] * 6, mx.zeros((6,), mx.int32), range(6))
    result = samples.read()
    assert result.token_ids == np.array(logits.astype(mx.float32)).argmax(axis=-1).tolist()
    assert result.finite == [True] * 6 and result.logprobs == [None] * 6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(1)[:, :12]
    count = 6000
    params = SamplingParams(temperature=temperature)
    rows = [row_of(params, seed=seed, position=seed % 7) for seed in range(count)]
    result = sample(np.repeat(logits, count, axis=0), rows)
    found = np.bincount(result.token_ids, minlength=12)
    expected = softmax(logits / temperature)[0] * count
    # Pearson's statistic with 11 degrees of freedom exceeds 31.3 once in a thousand experiments
    assert ((found - expected) ** 2 / expected).sum() < 31.3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-300),
        SamplingParams(temperature=1e-38),
        SamplingParams(temperature=1e-6, top_k=5),
        SamplingParams(top_p=1e-300),
    ],
)
def test_the_smallest_values_are_greedy(params: SamplingParams) -> None:
    logits = random_logits(4, scale=20.0)
    result = sample(logits, [row_of(params, seq_id=i, slot=i) for i in range(4)])
    assert list(result.token_ids) == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=1e300, top_p=0.9),
        SamplingParams(repetition_penalty=1e300),
        SamplingParams(repetition_penalty=1e-300, temperature=1e-3),
        SamplingParams(repetition_penalty=1e300, temperature=0, logprobs=2),
    ],
)
def test_the_largest_values_forbid_what_is_forbidden_and_nothing_else(params: SamplingParams) -> None:
    """Beyond what float32 holds, they must not turn minus infinity or zero into NaN."""
    logits = random_logits(1)
    logits[0, 5] = 0.0  # a logit of zero that a penalty meets
    drawn = set()
    for seed in range(20):
        row = row_of(params, seed=seed, suppress=(0, 1, 2, 3, 4), history=[5, 6, 7])
        drawn |= {int(token) for token in sample(logits, [row]).token_ids}
    assert not drawn & {0, 1, 2, 3, 4}
    if params.temperature == 1e300:
        assert len(drawn) > 5, "every token is as likely as any other"


def test_noise_depends_on_seed_and_position_alone() -> None:
    params = SamplingParams(temperature=1.0)
    logits = random_logits(1, scale=0.3)
    alone = {
        (seed, position): sample(logits, [row_of(params, seed=seed, position=position)]).token_ids[0]
        for seed in (0, 1, 2**63 + 5)
        for position in (1, 2, 700)
    }
    others = [row_of(GREEDY), row_of(SamplingParams(temperature=1.3, top_k=5), seed=9)]
    rows = [row_of(params, seq_id=i, slot=i, seed=s, position=p) for i, (s, p) in enumerate(alone)]
    mixed = [others[0], *rows[::-1], others[1]]
    together = sample(np.repeat(logits, len(mixed), axis=0), mixed).token_ids[1:-1][::-1]
    assert together == list(alone.values())
    assert len(set(alone.values())) > 4


def allowed_tokens(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """By definition: min_p, then the top_k likeliest, then the least set of them with mass top_p."""
    probabilities = softmax(logits / params.temperature)
    order = np.argsort(-probabilities, kind="stable")
    kept = [int(i) for i in order if probabilities[i] >= params.min_p * probabilities.max()]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    mass = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
    return set(kept[: int(np.searchsorted(mass, params.top_p - 1e-7)) + 1])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.7, 1.0, 1.5]),
    top_k=st.sampled_from([-1, 0, 1, 3, 10, 39, 40, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_filters_keep_what_their_definition_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(1, seed, scale=1.0)
    expected = allowed_tokens(logits[0], params)
    # A second parameter set beside it makes the rows differ in what they need sorted.
    other = SamplingParams(temperature=1.0, top_p=0.6)
    rows = [row_of(params, seed=i) for i in range(400)] + [row_of(other)]
    found = sample(np.repeat(logits, 401, axis=0), rows).token_ids[:400]
    assert set(found) <= expected
    likely = {i for i in expected if softmax(logits / temperature)[0, i] > 0.03}
    assert likely <= set(found)


def test_partial_and_full_sorts_agree() -> None:
    """A neighbour that needs every logit sorted changes nothing."""
    logits = np.random.default_rng(0).standard_normal((1, 3000)).astype(np.float32) * 3
    params = SamplingParams(temperature=1.0, top_k=900, top_p=0.7)
    rows = [row_of(params, seed=seed) for seed in range(50)]
    partial = sample(np.repeat(logits, 50, axis=0), rows).token_ids
    neighbour = row_of(SamplingParams(temperature=1.0, top_p=0.5))
    full = sample(np.repeat(logits, 51, axis=0), [*rows, neighbour]).token_ids[:50]
    assert partial == full


def test_bias_and_forbidden_tokens() -> None:
    logits = random_logits(4)
    best = logits.argmax(axis=-1).tolist()
    rows = [
        row_of(SamplingParams(temperature=0.0, logit_bias={7: 100.0})),
        row_of(SamplingParams(temperature=0.0, logit_bias={best[1]: -100.0})),
        row_of(GREEDY, suppress=(best[2],)),
        row_of(GREEDY),
    ]
    found = sample(logits, rows).token_ids
    second = [int(np.argsort(-row)[1]) for row in logits]
    assert found == [7, second[1], second[2], best[3]]


def penalised(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    out = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(output):
        out[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return out


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("restart", [False, True], ids=["kept", "restarted"])
def test_penalties_count_the_token_in_flight(restart: bool, lag: int) -> None:
    """Histories lag one token behind under run-ahead; a restarted sequence is counted from its history."""
    rng = np.random.default_rng(1)
    many = [
        SamplingParams(temperature=0.0, repetition_penalty=1.6),
        SamplingParams(temperature=0.0, presence_penalty=1.2),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
        SamplingParams(temperature=0.0, repetition_penalty=0.7, presence_penalty=-0.5, frequency_penalty=1.0),
        GREEDY,
    ]
    prompts = [[1, 2, 3, 3], [4, 4], [5], [6, 7, 8], [9]]
    outputs: list[list[int]] = [[] for _ in many]
    sampler = Sampler()
    base = rng.standard_normal((len(many), VOCAB)).astype(np.float32) * 0.6
    for step in range(25):
        if restart and step > 11:
            sampler.release([3 * index for index in range(len(many))])
        logits = base + rng.standard_normal(base.shape).astype(np.float32) * 0.1
        rows, inputs = [], []
        for index, (params, prompt, output) in enumerate(zip(many, prompts, outputs, strict=True)):
            tokens = prompt + output
            known = tokens[: len(tokens) - lag] if output else tokens
            rows.append(
                row_of(
                    params,
                    seq_id=index,
                    slot=3 * index,
                    position=len(tokens),
                    num_prompt=len(prompt),
                    history=known,
                )
            )
            inputs.append(tokens[-1])
        samples = sampler.sample(mx.array(logits), rows, mx.array(inputs), range(len(rows)))
        expected = [
            int(penalised(row, prompt, output, params).argmax())
            for row, prompt, output, params in zip(logits, prompts, outputs, many, strict=True)
        ]
        found = samples.read().token_ids
        assert found == expected
        for output, token in zip(outputs, found, strict=True):
            output.append(token)
    assert all(len(set(output)) > len(set(outputs[4])) for output in outputs[:2])


def test_a_slot_that_changes_hands_does_not_inherit_counts() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=5.0)
    logits = np.full((1, VOCAB), 0.1, np.float32)
    logits[0, 4], logits[0, 9] = 3.0, 1.0
    sampler = Sampler()
    first = row_of(params, seq_id=1, slot=2, position=4, history=[1, 2, 4], num_prompt=3)
    assert sampler.sample(mx.array(logits), [first], mx.array([4]), [0]).read().token_ids == [9]
    second = row_of(params, seq_id=2, slot=2, position=4, history=[1, 2, 3], num_prompt=3)
    assert sampler.sample(mx.array(logits), [second], mx.array([3]), [0]).read().token_ids == [4]


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(4)
    rows = [
        row_of(SamplingParams(temperature=0.0, logprobs=3)),
        row_of(GREEDY),
        row_of(SamplingParams(temperature=1.5, top_k=4, logprobs=0), seed=3),
        row_of(SamplingParams(temperature=0.0, logprobs=20, logit_bias={5: 100.0})),
    ]
    result = sample(logits, rows)
    reference = np.log(softmax(logits))
    assert result.logprobs[1] is None
    for index, wanted in ((0, 3), (2, 0), (3, 20)):
        found = result.logprobs[index]
        assert found is not None and found.token_id == result.token_ids[index]
        assert found.logprob == pytest.approx(reference[index, found.token_id], abs=1e-5)
        order = np.argsort(-reference[index])[:wanted]
        assert [token for token, _ in found.top] == order.tolist()
        assert [value for _, value in found.top] == pytest.approx(reference[index, order].tolist(), abs=1e-5)
    assert result.token_ids[3] == 5


MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=7, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, logprobs=1),
    SamplingParams(temperature=0.6, min_p=0.1, presence_penalty=0.5),
    SamplingParams(temperature=1.0, logit_bias={3: 2.0, 8: -100.0}),
]


def mixed_rows() -> list[SampleRow]:
    return [
        row_of(params, seq_id=i, slot=i, seed=100 + i, position=4 + i, history=[i, i + 1, 2] + [9] * (1 + i))
        for i, params in enumerate(MIXED)
    ]


def test_every_row_is_sampled_as_if_it_were_alone() -> None:
    logits, rows, inputs = random_logits(len(MIXED)), mixed_rows(), [9, 2, 9, 9, 9, 9]
    together = sample(logits, rows, inputs)
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1], [row], inputs[index : index + 1])
        assert [column[0] for column in alone] == [column[index] for column in together]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, "mixed"])
def test_a_row_of_inf_and_nan_changes_nothing_for_the_others(poison: float | str) -> None:
    logits, rows, inputs = random_logits(len(MIXED) + 1), mixed_rows(), [9, 2, 9, 9, 9, 9, 9]
    for params in (GREEDY, MIXED[1], SamplingParams(temperature=0.0, repetition_penalty=2.0, logprobs=5)):
        last = row_of(params, seq_id=50, slot=50)
        clean = sample(logits, [*rows, last], inputs)
        bad = logits.copy()
        bad[-1] = poison if isinstance(poison, float) else np.resize([np.nan, np.inf, -np.inf, 1.0], VOCAB)
        found = sample(bad, [*rows, last], inputs)
        assert [column[:-1] for column in found] == [column[:-1] for column in clean]
        assert clean.finite[-1] and not found.finite[-1]
