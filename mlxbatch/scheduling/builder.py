"""Collects the decisions of one plan and turns them into an immutable StepPlan."""

from __future__ import annotations

from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import (
    NOT_ON_HOST,
    ChunkRow,
    DecodeRow,
    Flush,
    SampleRow,
    StepPlan,
    TailBlock,
    TailCopy,
)
from mlxbatch.scheduling.sequence import Sequence


class StepBuilder:
    """Decisions may still be dropped (a preemption) until build(), which advances the sequences."""

    def __init__(self, kv: KVMemory, step: int) -> None:
        self._kv = kv
        self._step = step
        self.decodes: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []
        self.forks: list[tuple[Sequence, Sequence]] = []
        self.flush_pending = False
        self.off_target = False
        self.released_slots: list[int] = []
        self._tail_blocks: dict[tuple[int | None, ...], TailBlock] = {}

    def drop(self, seq: Sequence) -> None:
        """A sequence that was chosen for this step is preempted after all."""
        if seq in self.decodes:
            self.decodes.remove(seq)
        self.chunks = [(other, size) for other, size in self.chunks if other is not seq]

    def flush_tail(self, seq: Sequence, end: int) -> None:
        """Write the full blocks [flushed, end) of a sequence's tail. Forks that share a block write it once."""
        kv = seq.memory
        size = self._kv.block_size
        for number in range(kv.flushed // size, end // size):
            ids = tuple(t.span(number, number + 1)[0] for t in kv.tables)
            self._tail_blocks.setdefault(ids, TailBlock(seq.slot, number * size, ids))

    def size_of(self, seq: Sequence) -> int:
        """Tokens of this sequence in the step."""
        return next((size for other, size in self.chunks if other is seq), 1)

    def samples(self, seq: Sequence) -> bool:
        """Whether this step computes the sequence's last token, so that the next one is sampled."""
        return seq.num_computed + self.size_of(seq) == seq.num_tokens

    def build(self, num_slots: int) -> tuple[StepPlan | None, set[int]]:
        """The plan (None if there is nothing to do), and the ids of sequences whose chunk leaves full blocks
        that the next plan must flush."""
        step = self._step
        samples: list[SampleRow] = []
        decodes: list[DecodeRow] = []
        chunks: list[ChunkRow] = []
        pending: set[int] = set()
        children: dict[int, list[Sequence]] = {}
        for parent, child in self.forks:
            children.setdefault(parent.seq_id, []).append(child)
        for token_index, seq in enumerate(self.decodes):
            decodes.append(self._decode_row(seq))
            seq.num_computed += 1
            self._sample(seq, token_index, samples)
            for child in children.get(seq.seq_id, ()):
                self._sample(child, token_index, samples)
        end = len(decodes)
        for seq, size in self.chunks:
            row = self._chunk_row(seq, size)
            chunks.append(row)
            end += size
            forks = children.get(seq.seq_id, ())
            if seq.num_computed + size - row.view.flushed >= self._kv.block_size:
                pending.add(seq.seq_id)
                pending.update(child.seq_id for child in forks)
            seq.num_computed += size
            if seq.num_computed == seq.num_tokens:
                for sampled in (seq, *forks):
                    self._sample(sampled, end - 1, samples)
        flush = self._flush()
        if not (decodes or chunks or flush):
            return None, pending
        plan = StepPlan(
            step=step,
            num_slots=num_slots,
            decode=tuple(decodes),
            chunks=tuple(chunks),
            samples=tuple(samples),
            tail_copies=tuple(TailCopy(parent.slot, child.slot) for parent, child in self.forks),
            flush=flush,
            released_slots=tuple(self.released_slots),
            off_target=self.off_target,
        )
        return plan, pending

    def _flush(self) -> Flush | None:
        resized, moves = self._kv.take_changes()
        if not (resized or moves or self.flush_pending or self._tail_blocks):
            return None
        return Flush(self._kv.num_blocks, self.flush_pending, moves, tuple(self._tail_blocks.values()))

    def _decode_row(self, seq: Sequence) -> DecodeRow:
        position, ids = seq.num_computed, seq.token_ids
        view = seq.memory.view
        if position < len(ids):
            return DecodeRow(seq.seq_id, seq.slot, position, ids[position], -1, view)
        return DecodeRow(seq.seq_id, seq.slot, position, NOT_ON_HOST, seq.sample_index, view)

    def _chunk_row(self, seq: Sequence, size: int) -> ChunkRow:
        kv = seq.memory
        start = seq.num_computed
        block = self._kv.block_size
        first, full = kv.flushed // block, (start + size) // block
        new_blocks = tuple(t.span(first, full) for t in kv.tables)
        ids = tuple(seq.token_ids[start : start + size])
        return ChunkRow(seq.seq_id, seq.slot, start, ids, kv.view, new_blocks)

    def _sample(self, seq: Sequence, token_index: int, samples: list[SampleRow]) -> None:
        params = seq.request.params
        samples.append(
            SampleRow(
                seq.seq_id,
                seq.slot,
                token_index,
                len(seq.token_ids) + seq.in_flight,
                params,
                seq.seed,
                seq.suppressed_ids() if params.min_tokens else (),
                seq.num_prompt_tokens,
                seq.token_ids,
            )
        )
        seq.sample_index = len(samples) - 1
        seq.in_flight += 1
