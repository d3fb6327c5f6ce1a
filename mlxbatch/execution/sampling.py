"""Sampling, vectorised over rows, with parameters per row.

Order, as in vLLM: penalties, logit bias and forbidden tokens; then temperature, min_p, top_k, top_p; then
Gumbel noise and an argmax. Log-probabilities are those of the model, before any of it. A row of greedy
requests only costs one argmax.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxbatch.execution.arrays import with_rows
from mlxbatch.execution.noise import gumbel, sampling_keys
from mlxbatch.execution.penalties import LARGEST_FACTOR, PenaltyCounts
from mlxbatch.request import TokenLogprob
from mlxbatch.scheduling.plan import SampleRow, StepResult

# Up to this top_k the candidates are found by a partial sort, which is ten times cheaper than a full one.
_PARTIAL_SORT_LIMIT = 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Logprobs:
    """For rows that want them (`wanted[j]` is how many): chosen [m], top ids and values [m, k], best first."""

    rows: tuple[int, ...]
    wanted: tuple[int, ...]
    chosen: mx.array
    top_ids: mx.array
    top_values: mx.array


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """What a step sampled, still on the device: ids int32 [n] and whether each row's logits were sound."""

    token_ids: mx.array
    finite: mx.array
    logprobs: _Logprobs | None = None

    def arrays(self) -> list[mx.array]:
        extra = self.logprobs
        return [self.token_ids, self.finite] + (
            [extra.chosen, extra.top_ids, extra.top_values] if extra is not None else []
        )

    def read(self) -> StepResult:
        """Wait for the device and bring everything to the host."""
        token_ids: list[int] = _host(self.token_ids)
        logprobs: list[TokenLogprob | None] = [None] * len(token_ids)
        if self.logprobs is not None:
            extra = self.logprobs
            columns = (_host(extra.chosen), _host(extra.top_ids), _host(extra.top_values))
            for row, wanted, chosen, ids, values in zip(extra.rows, extra.wanted, *columns, strict=True):
                top = tuple(zip(ids[:wanted], values[:wanted], strict=True))
                logprobs[row] = TokenLogprob(token_ids[row], chosen, top)
        return StepResult(token_ids, _host(self.finite), logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class _Biases:
    """Additions to single logits; forbidden tokens add minus infinity."""

    rows: mx.array
    tokens: mx.array
    values: mx.array


class _Batch:
    """Everything about a set of rows that stays the same from step to step."""

    def __init__(self, rows: Sequence[SampleRow]) -> None:
        self.rows = tuple(rows)
        params = [row.params for row in rows]
        self.penalised = [i for i, p in enumerate(params) if p.has_penalties]
        self.random = [i for i, p in enumerate(params) if not p.greedy]
        self.logprobs = [i for i, p in enumerate(params) if p.logprobs is not None]
        self.biases = _biases_of(rows)
        self.greedy_only = not (self.penalised or self.random or self.logprobs or self.biases)
        self.seeds = np.array([rows[i].seed & (2**64 - 1) for i in self.random], np.uint64)
        chosen = [params[i] for i in self.random]
        self.temperatures = mx.array(np.array([[min(p.temperature, LARGEST_FACTOR)] for p in chosen], np.float32))
        min_p = np.array([[p.min_p] for p in chosen], np.float32)
        with np.errstate(divide="ignore"):
            self.log_min_p = mx.array(np.log(min_p)) if min_p.any() else None
        self.filtered = [j for j, p in enumerate(chosen) if p.top_k > 0 or p.top_p < 1.0]
        self.top_k = [chosen[j].top_k for j in self.filtered]
        self.top_p = mx.array(np.array([[chosen[j].top_p] for j in self.filtered], np.float32))

    def holds(self, rows: Sequence[SampleRow]) -> bool:
        return len(rows) == len(self.rows) and all(
            new.params is old.params
            and new.seq_id == old.seq_id
            and new.seed == old.seed
            and new.suppress == old.suppress
            for new, old in zip(rows, self.rows, strict=True)
        )


class Sampler:
    """Samples the rows of steps in order. Keeps penalty counts per slot, and device copies of parameters."""

    def __init__(self) -> None:
        self._batch: _Batch | None = None
        self._penalties = PenaltyCounts()

    def release(self, slots: Iterable[int]) -> None:
        """The sequences in these slots are gone."""
        self._penalties.release(slots)

    def state_arrays(self) -> list[mx.array]:
        return self._penalties.arrays()

    def sample(
        self, logits: mx.array, rows: Sequence[SampleRow], inputs: mx.array, places: Sequence[int]
    ) -> Samples:
        """logits [n, vocab], one row for each of `rows`; row i's newest input token is `inputs[places[i]]`."""
        batch = self._batch
        if batch is None or not batch.holds(rows):
            batch = self._batch = _Batch(rows)
        if batch.greedy_only:
            token_ids = mx.argmax(logits, axis=-1).astype(mx.int32)
            best = mx.take_along_axis(logits, token_ids[:, None], axis=-1)
            return Samples(token_ids, mx.isfinite(best[:, 0]))
        raw = logits.astype(mx.float32)
        shaped = self._shape(raw, rows, batch, inputs, places)
        token_ids = mx.argmax(shaped, axis=-1).astype(mx.int32)
        if batch.random:
            token_ids = self._draw(token_ids, shaped, rows, batch)
        return Samples(
            token_ids,
            mx.isfinite(shaped.max(axis=-1)),
            _logprobs(raw, token_ids, rows, batch.logprobs) if batch.logprobs else None,
        )

    def _shape(
        self,
        logits: mx.array,
        rows: Sequence[SampleRow],
        batch: _Batch,
        inputs: mx.array,
        places: Sequence[int],
    ) -> mx.array:
        """Penalties, biases and forbidden tokens."""
        if batch.penalised:
            own = [rows[i] for i in batch.penalised]
            newest = inputs[mx.array([places[i] for i in batch.penalised])]
            if len(own) == len(rows):
                logits = self._penalties.apply(logits, own, newest)
            else:
                index = mx.array(batch.penalised)
                penalised = self._penalties.apply(logits[index], own, newest)
                logits = with_rows(logits, index, penalised)
        if batch.biases is not None:
            logits = logits.at[batch.biases.rows, batch.biases.tokens].add(batch.biases.values)
        return logits

    def _draw(
        self, greedy: mx.array, logits: mx.array, rows: Sequence[SampleRow], batch: _Batch
    ) -> mx.array:
        """Replace the greedy ids of random rows by samples."""
        whole = len(batch.random) == len(rows)
        index = None if whole else mx.array(batch.random)
        own = logits if index is None else logits[index]
        own = _filter(own / batch.temperatures, batch)
        positions = np.array([rows[i].position for i in batch.random], np.uint64)
        noise = gumbel(sampling_keys(batch.seeds, positions), int(own.shape[1]))
        drawn = mx.argmax(own + noise, axis=-1).astype(mx.int32)
        return drawn if index is None else with_rows(greedy, index, drawn)


def _host(array: mx.array) -> list[Any]:
    values: Any = array.tolist()
    return list(values)


def _biases_of(rows: Sequence[SampleRow]) -> _Biases | None:
    entries = [
        (index, token, value)
        for index, row in enumerate(rows)
        for token, value in (*row.params.logit_bias.items(), *((t, -float("inf")) for t in row.suppress))
    ]
    if not entries:
        return None
    indices, tokens, values = zip(*entries, strict=True)
    return _Biases(mx.array(indices), mx.array(tokens), mx.array(values, mx.float32))


def _filter(logits: mx.array, batch: _Batch) -> mx.array:
    """Minus infinity for what min_p, top_k and top_p exclude. Logits [m, vocab] are divided by temperature;
    equal logits at the edge are all kept."""
    if batch.log_min_p is not None:
        floor = logits.max(axis=-1, keepdims=True) + batch.log_min_p
        logits = mx.where(logits >= floor, logits, -mx.inf)
    if not batch.filtered:
        return logits
    whole = len(batch.filtered) == int(logits.shape[0])
    index = None if whole else mx.array(batch.filtered)
    own = logits if index is None else logits[index]
    kept = mx.where(own >= _edge(own, batch), own, -mx.inf)
    return kept if index is None else with_rows(logits, index, kept)


def _edge(logits: mx.array, batch: _Batch) -> mx.array:
    """The least logit that top_k and top_p keep, [m, 1]."""
    vocab = int(logits.shape[1])
    limits = [min(k, vocab) if k > 0 else vocab for k in batch.top_k]
    width = max(limits)
    if width <= min(_PARTIAL_SORT_LIMIT, vocab - 1):
        best = -mx.sort(-mx.topk(logits, width, axis=-1), axis=-1)
    else:
        best = -mx.sort(-logits, axis=-1)
        width = vocab
    limit = mx.array(np.array(limits, np.int32)[:, None])
    best = mx.where(mx.arange(width) < limit, best, -mx.inf)
    probabilities = mx.softmax(best, axis=-1)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    count = mx.maximum(((before < batch.top_p) & (best > -mx.inf)).sum(axis=-1, keepdims=True), 1)
    return mx.take_along_axis(best, count - 1, axis=-1)


def _logprobs(
    logits: mx.array, token_ids: mx.array, rows: Sequence[SampleRow], wanted_rows: Sequence[int]
) -> _Logprobs:
    index = mx.array(list(wanted_rows))
    own = logits[index]
    own = own - mx.logsumexp(own, axis=-1, keepdims=True)
    wanted = tuple(rows[i].params.logprobs or 0 for i in wanted_rows)
    chosen = mx.take_along_axis(own, token_ids[index][:, None], axis=-1)[:, 0]
    vocab = int(own.shape[1])
    count = min(max(1, *wanted) if len(wanted) > 1 else max(1, wanted[0]), vocab)
    top_ids = mx.argpartition(own, kth=vocab - count, axis=-1)[:, vocab - count :]
    top_values = mx.take_along_axis(own, top_ids, axis=-1)
    order = mx.argsort(-top_values, axis=-1)
    return _Logprobs(
        tuple(wanted_rows),
        wanted,
        chosen,
        mx.take_along_axis(top_ids, order, axis=-1),
        mx.take_along_axis(top_values, order, axis=-1),
    )
