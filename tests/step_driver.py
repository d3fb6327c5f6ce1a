"""Builds step plans by hand, so that the runner can be tested without the scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxbatch.request import SamplingParams, TokenLogprob
from mlxbatch.scheduling.plan import (
    NOT_ON_HOST,
    BlockTable,
    ChunkRow,
    DecodeRow,
    Flush,
    KVView,
    Runner,
    SampleRow,
    StepHandle,
    StepPlan,
    TailBlock,
    TailCopy,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)


@dataclass(eq=False)
class DrivenSequence:
    """One sequence as the driver sees it. `tokens` ends with NOT_ON_HOST while a sample is in flight."""

    seq_id: int
    slot: int
    tokens: list[int]
    params: SamplingParams
    num_prompt: int
    view: KVView
    seed: int = 0
    computed: int = 0
    source: int = -1
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class StepDriver:
    """Runs sequences on a runner with shuffled blocks; every step is read only after the next is launched."""

    def __init__(self, runner: Runner, num_blocks: int = 200, num_slots: int = 8, seed: int = 0) -> None:
        self.runner = runner
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.free = [list(range(1, num_blocks)) for _ in runner.groups]
        for ids in self.free:
            random.Random(seed).shuffle(ids)
        self.sequences: list[DrivenSequence] = []
        self.step_number = 0
        self.grown = False
        self.pending: list[tuple[DrivenSequence, KVView]] = []
        self.in_flight: tuple[StepHandle, list[DrivenSequence]] | None = None
        self.released: list[int] = []

    def add(
        self, prompt: Sequence[int], params: SamplingParams = GREEDY, *, seed: int = 0, slot: int | None = None
    ) -> DrivenSequence:
        number = len(self.sequences)
        view = KVView(0, tuple(BlockTable(0, np.zeros(0, np.int32)) for _ in self.runner.groups))
        seq = DrivenSequence(
            number, number if slot is None else slot, list(prompt), params, len(prompt), view, seed
        )
        self.sequences.append(seq)
        self.released.append(seq.slot)
        return seq

    def step(
        self,
        decode: Iterable[DrivenSequence] = (),
        chunks: Iterable[tuple[DrivenSequence, int]] = (),
        forks: Iterable[tuple[DrivenSequence, DrivenSequence]] = (),
    ) -> StepPlan:
        """Plan and launch one step; `forks` are (parent, new sequence) pairs that sample from the parent's row."""
        decode, chunks, forks = list(decode), list(chunks), list(forks)
        flush = self._flush([*decode, *(seq for seq, _ in chunks)])
        rows = tuple(
            DecodeRow(seq.seq_id, seq.slot, seq.computed, seq.tokens[seq.computed], seq.source, seq.view)
            for seq in decode
        )
        samples: list[SampleRow] = []
        sampled: list[DrivenSequence] = []
        self.pending = []
        index = 0
        chunk_rows = []
        work = [(seq, 1, False) for seq in decode] + [(seq, n, True) for seq, n in chunks]
        for seq, length, is_chunk in work:
            if is_chunk:
                chunk_rows.append(self._chunk(seq, length))
            seq.computed += length
            index += length
            if seq.computed == len(seq.tokens):
                for row in [seq, *(child for parent, child in forks if parent is seq)]:
                    if row is not seq:
                        row.tokens, row.computed, row.view = list(seq.tokens), seq.computed, seq.view
                        self.pending += [(row, view) for owner, view in self.pending if owner is seq]
                    samples.append(self._sample_row(row, index - 1))
                    sampled.append(row)
        plan = StepPlan(
            step=self.step_number,
            num_slots=self.num_slots,
            decode=rows,
            chunks=tuple(chunk_rows),
            samples=tuple(samples),
            tail_copies=tuple(TailCopy(parent.slot, child.slot) for parent, child in forks),
            flush=flush,
            released_slots=tuple(self.released),
        )
        self.released = []
        self.step_number += 1
        handle = self.runner.launch(plan)
        before, self.in_flight = self.in_flight, (handle, sampled)
        self._read(before)
        for number, seq in enumerate(sampled):
            seq.tokens.append(NOT_ON_HOST)
            seq.source = number
        return plan

    def drain(self) -> None:
        """Read what is in flight; the next step starts with every token on the host."""
        before, self.in_flight = self.in_flight, None
        self._read(before)

    def _read(self, step: tuple[StepHandle, list[DrivenSequence]] | None) -> None:
        if step is None:
            return
        handle, rows = step
        result = handle.result()
        for seq, token, finite, logprob in zip(rows, *result, strict=True):
            seq.tokens[seq.tokens.index(NOT_ON_HOST)] = token
            seq.finite.append(finite)
            seq.logprobs.append(logprob)

    def _sample_row(self, seq: DrivenSequence, token_index: int) -> SampleRow:
        history = [token for token in seq.tokens if token != NOT_ON_HOST]
        return SampleRow(
            seq.seq_id,
            seq.slot,
            token_index,
            len(seq.tokens),
            seq.params,
            seq.seed,
            (),
            seq.num_prompt,
            history,
        )

    def _chunk(self, seq: DrivenSequence, length: int) -> ChunkRow:
        size = self.runner.block_size
        first, last = seq.view.flushed // size, (seq.computed + length) // size
        count = max(0, last - first)
        new_blocks = tuple(tuple(ids.pop() for _ in range(count)) for ids in self.free)
        row = ChunkRow(
            seq.seq_id,
            seq.slot,
            seq.computed,
            tuple(seq.tokens[seq.computed : seq.computed + length]),
            seq.view,
            new_blocks,
        )
        if count:
            self.pending.append((seq, self._extended(seq.view, new_blocks, count)))
        return row

    def _extended(self, view: KVView, blocks: tuple[tuple[int, ...], ...], count: int) -> KVView:
        tables = tuple(
            BlockTable(table.first, np.array([*table.ids, *new], np.int32))
            for table, new in zip(view.tables, blocks, strict=True)
        )
        return KVView(view.flushed + count * self.runner.block_size, tables)

    def _flush(self, rows: list[DrivenSequence]) -> Flush | None:
        """Flush the chunks of the step before, and tails that this step would overflow."""
        for seq, view in self.pending:
            seq.view = view
        tail_blocks = []
        for seq in rows:
            if seq.computed + 1 - seq.view.flushed > self.runner.tail_len:
                blocks = tuple((ids.pop(),) for ids in self.free)
                tail_blocks.append(TailBlock(seq.slot, seq.view.flushed, tuple(ids[0] for ids in blocks)))
                seq.view = self._extended(seq.view, blocks, 1)
        if self.grown and not self.pending and not tail_blocks:
            return None
        self.grown = True
        return Flush((self.num_blocks,) * len(self.free), bool(self.pending), (), tuple(tail_blocks))
