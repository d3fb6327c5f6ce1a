"""Repetition, presence and frequency penalties from token counts that stay on the device.

A row's counts cover the tokens before its newest input. That one may have been sampled by the step still in
flight, so it is added on the device; nothing is read back and nothing grows with the length of the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from mlxbatch.scheduling.plan import SampleRow

LARGEST_FACTOR = 1e30  # infinity in its place would turn a logit of zero, or a forbidden one, into NaN


class PenaltyCounts:
    """Counts of generated tokens and flags of prompt tokens, one row of vocabulary size for each slot in use."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}  # slot -> row of the arrays
        self._covered: dict[int, tuple[int, int]] = {}  # slot -> (seq_id, tokens counted)
        self._generated = mx.zeros((0, 0), mx.uint16)  # [rows, vocab]
        self._prompt = mx.zeros((0, 0), mx.bool_)  # [rows, vocab]

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._covered.pop(slot, None)
            self._row_of.pop(slot, None)

    def arrays(self) -> list[mx.array]:
        """State for the step's `async_eval`."""
        return [self._generated, self._prompt] if self._generated.size else []

    def apply(self, logits: mx.array, rows: Sequence[SampleRow], inputs: mx.array) -> mx.array:
        """Penalise float32 logits [n, vocab]; `inputs` int32 [n] are the rows' newest input tokens."""
        vocab = int(logits.shape[1])
        index = mx.array(np.array([self._prepare(row, vocab) for row in rows], np.int32))
        is_output = np.array([row.position - 1 >= row.num_prompt_tokens for row in rows], np.uint16)
        self._generated = self._generated.at[index, inputs].add(mx.array(is_output))
        counts = self._generated[index]
        repeated = counts > 0
        seen = repeated | self._prompt[index]
        factors = np.clip([[row.params.repetition_penalty] for row in rows], 1 / LARGEST_FACTOR, LARGEST_FACTOR)
        repetition = mx.array(factors.astype(np.float32))
        presence, frequency = (
            mx.array(np.array([[getattr(row.params, name)] for row in rows], np.float32))
            for name in ("presence_penalty", "frequency_penalty")
        )
        scaled = mx.where(logits > 0, logits / repetition, logits * repetition)
        logits = mx.where(seen, scaled, logits)
        return logits - frequency * counts.astype(mx.float32) - presence * repeated.astype(mx.float32)

    def _prepare(self, row: SampleRow, vocab: int) -> int:
        """The array row of a sequence, with its counts up to the newest input (that one excluded)."""
        before = row.position - 1
        if self._covered.get(row.slot) != (row.seq_id, before):
            self._fill(row, before, vocab)
        self._covered[row.slot] = (row.seq_id, before + 1)
        return self._row_of[row.slot]

    def _fill(self, row: SampleRow, before: int, vocab: int) -> None:
        index = self._row_of.get(row.slot)
        if index is None:
            taken = set(self._row_of.values())
            index = next(i for i in range(len(taken) + 1) if i not in taken)
            self._row_of[row.slot] = index
        capacity = int(self._generated.shape[0])
        if index >= capacity:
            added = max(4, capacity)
            generated, prompt = mx.zeros((added, vocab), mx.uint16), mx.zeros((added, vocab), mx.bool_)
            if capacity:
                generated = mx.concatenate([self._generated, generated])
                prompt = mx.concatenate([self._prompt, prompt])
            self._generated, self._prompt = generated, prompt
        history = np.array(row.history[:before], np.int64)
        flags = np.zeros(vocab, np.bool_)
        flags[np.array(row.history[: row.num_prompt_tokens], np.int64)] = True
        self._prompt[index] = mx.array(flags)
        self._generated[index] = mx.array(
            np.bincount(history[row.num_prompt_tokens :], minlength=vocab).astype(np.uint16)
        )
