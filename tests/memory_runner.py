"""A runner without a model: its "K and V" are token ids, so that every read can be checked.

It carries out a StepPlan literally, on pools and tails of token ids, and raises AssertionError when a row would
attend to anything but its own sequence's tokens. The next token is a function of the position and of the tokens
before it, so preempted and undisturbed sequences must end alike.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from mlxbatch.scheduling.plan import NOT_ON_HOST, GroupSpec, StepPlan, StepResult

EMPTY = None
Cell = tuple[int, int] | None  # (position, token id)


def next_token(token_ids: list[int], seed: int = 0, vocab: int = 50) -> int:
    return zlib.crc32(repr((seed, token_ids)).encode()) % vocab


@dataclass
class Handle:
    value: StepResult
    reads: list[int]
    step: int

    def result(self) -> StepResult:
        self.reads.append(self.step)
        return self.value


@dataclass
class MemoryRunner:
    groups: tuple[GroupSpec, ...]
    block_size: int
    tail_len: int
    vocab: int = 50
    seeded: bool = False  # the next token depends on the row's seed too
    pools: list[list[list[Cell]]] = field(default_factory=list)
    tails: dict[int, list[Cell]] = field(default_factory=dict)
    pending: list[tuple[int, int, list[Cell]]] = field(default_factory=list)
    last_samples: list[int] = field(default_factory=list)
    launches: list[StepPlan] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    non_finite_at: set[tuple[int, int]] = field(default_factory=set)  # (seq_id, position)

    def __post_init__(self) -> None:
        self.pools = [[self._empty_block()] for _ in self.groups]

    def _empty_block(self) -> list[Cell]:
        return [EMPTY] * self.block_size

    def launch(self, plan: StepPlan) -> Handle:
        self.launches.append(plan)
        if plan.flush is not None:
            self._flush(plan)
        else:
            assert not self.pending, "a chunk's blocks must be flushed by the very next plan"
        if not plan.has_rows:
            return Handle(StepResult([], [], []), self.reads, plan.step)
        contexts: list[list[int]] = []  # for each flat token: the ids it sees, itself included
        before = {slot: list(cells) for slot, cells in self.tails.items()}
        for row in plan.decode:
            token = row.token_id if row.token_id != NOT_ON_HOST else self.last_samples[row.source]
            tail = self._tail(row.slot)
            tail[row.position % self.tail_len] = (row.position, token)
            contexts.append(self._read(row.view, tail, row.position + 1, []))
        for chunk in plan.chunks:
            own = [(chunk.start + i, t) for i, t in enumerate(chunk.token_ids)]
            old = before.get(chunk.slot, [EMPTY] * self.tail_len)
            for i in range(len(own)):
                contexts.append(self._read(chunk.view, old, chunk.start, own[: i + 1]))
            self._store_chunk(chunk, old, own)
        for copy in plan.tail_copies:
            self.tails[copy.dst] = list(self._tail(copy.src))
        self.last_samples = [
            next_token(contexts[s.token_index], s.seed if self.seeded else 0, self.vocab) for s in plan.samples
        ]
        for sample in plan.samples:
            assert sample.position == len(contexts[sample.token_index])
        finite = [(s.seq_id, s.position) not in self.non_finite_at for s in plan.samples]
        result = StepResult(list(self.last_samples), finite, [None] * len(plan.samples))
        return Handle(result, self.reads, plan.step)

    def _tail(self, slot: int) -> list[Cell]:
        return self.tails.setdefault(slot, [EMPTY] * self.tail_len)

    def _flush(self, plan: StepPlan) -> None:
        flush = plan.flush
        assert flush is not None
        for pool, size in zip(self.pools, flush.num_blocks, strict=True):
            while len(pool) < size:
                pool.append(self._empty_block())
        if flush.pending:
            for group, block_id, cells in self.pending:
                self.pools[group][block_id] = cells
            self.pending = []
        assert not self.pending
        assert len({(m.group, m.dst) for m in flush.moves}) == len(flush.moves), "two moves share a destination"
        moved = [self.pools[move.group][move.src] for move in flush.moves]  # all read before any is written
        for move, block in zip(flush.moves, moved, strict=True):
            self.pools[move.group][move.dst] = block
        for block in flush.tail_blocks:
            tail = self._tail(block.slot)
            cells = [tail[p % self.tail_len] for p in range(block.start, block.start + self.block_size)]
            for group, block_id in enumerate(block.block_ids):
                if block_id is not None:
                    self.pools[group][block_id] = list(cells)
        for pool, size in zip(self.pools, flush.num_blocks, strict=True):
            del pool[size:]

    def _read(self, view, tail: list[Cell], tail_end: int, own: list[Cell]) -> list[int]:
        """Token ids of positions [0, end); asserts that each source holds exactly the positions it should."""
        end = tail_end + len(own)
        result: list[int] | None = None
        for group, spec in enumerate(self.groups):
            table = view.tables[group]
            first_seen = 0 if spec.window is None else max(0, end - spec.window)
            cells: list[Cell] = []
            for position in range(first_seen, end):
                if position < view.flushed:
                    number = position // self.block_size - table.first
                    assert 0 <= number < len(table.ids), (position, table)
                    cell = self.pools[group][table.ids[number]][position % self.block_size]
                elif position < tail_end:
                    cell = tail[position % self.tail_len]
                else:
                    cell = own[position - tail_end]
                assert cell is not None and cell[0] == position, (spec.name, position, cell, view.flushed)
                cells.append(cell)
            ids = [cell[1] for cell in cells if cell is not None]
            if result is None or len(ids) > len(result):
                result = ids
        assert result is not None and len(result) == end, "one group must be full attention"
        return result

    def _store_chunk(self, chunk, old: list[Cell], own: list[Cell]) -> None:
        joined = {p: old[p % self.tail_len] for p in range(chunk.view.flushed, chunk.start)}
        joined.update({cell[0]: cell for cell in own})
        end = chunk.start + len(own)
        full = end // self.block_size * self.block_size
        first = chunk.view.flushed // self.block_size
        for group, ids in enumerate(chunk.new_blocks):
            assert len(ids) == full // self.block_size - first
            for i, block_id in enumerate(ids):
                base = (first + i) * self.block_size
                if block_id is not None:
                    self.pending.append((group, block_id, [joined[p] for p in range(base, base + self.block_size)]))
        tail = self._tail(chunk.slot)
        for position in range(max(full, chunk.start), end):
            tail[position % self.tail_len] = joined[position]
