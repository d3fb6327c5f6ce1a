"""KV memory as the scheduler sees it: one block pool for each KV group under one budget in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxbatch.scheduling.blocks import BlockPool
from mlxbatch.scheduling.plan import ZERO_BLOCK, BlockMove, BlockTable, GroupSpec, KVView
from mlxbatch.scheduling.prefix import ROOT, BlockHash, block_content, block_hash

FIRST_GROWTH = 64  # blocks of the first growth; after that a pool doubles until the budget ends it


@dataclass(slots=True, eq=False)
class GroupTable:
    """Blocks of one sequence in one group: `ids[i]` holds block number first + i.

    Ids from `flushed` on are allocated but not yet written; None marks a block that no later position sees.
    Ids only come at the end, so the array behind a BlockTable grows in place: a flush costs the same at any length.
    """

    first: int = 0
    ids: list[int | None] = field(default_factory=list)
    _shown: np.ndarray = field(default_factory=lambda: np.zeros(16, np.int32))
    _num_shown: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.ids)

    @property
    def num_held(self) -> int:
        return len(self.ids) - self.ids.count(None)

    def span(self, first: int, end: int) -> tuple[int | None, ...]:
        """Ids of block numbers [first, end), None for those that have left the window."""
        left = max(0, min(self.first, end) - first)
        return (None,) * left + tuple(self.ids[first + left - self.first : end - self.first])

    def drop_first(self, count: int) -> None:
        """Forget blocks that have left the window."""
        self.replace(self.first + count, self.ids[count:])

    def replace(self, first: int, ids: list[int | None]) -> None:
        self.first, self.ids = first, ids
        self._shown, self._num_shown = np.zeros(max(16, 2 * len(ids)), np.int32), 0

    def view(self, end: int) -> BlockTable:
        """Blocks up to number `end`, which are written."""
        count = max(0, end - self.first)
        if count > len(self._shown):
            larger = np.zeros(2 * count, np.int32)
            larger[: self._num_shown] = self._shown[: self._num_shown]
            self._shown = larger
        for at in range(self._num_shown, count):
            self._shown[at] = self.ids[at] or ZERO_BLOCK
        self._num_shown = max(self._num_shown, count)
        return BlockTable(self.first, self._shown[:count])


@dataclass(slots=True, eq=False)
class SequenceKV:
    """Where one sequence's K and V are: positions [0, flushed) in blocks, the rest in its tail slot."""

    tables: list[GroupTable]
    flushed: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    view: KVView = field(default_factory=lambda: KVView(0, ()))

    @property
    def view_holds(self) -> bool:
        """Whether the view names nothing that has been given back."""
        return all(v.first >= t.first for v, t in zip(self.view.tables, self.tables, strict=True))

    def refresh_view(self, block_size: int) -> None:
        full = self.flushed // block_size
        self.view = KVView(self.flushed, tuple(table.view(full) for table in self.tables))


class KVMemory:
    """All block pools. `budget` bounds the bytes of every pool together, zero blocks included."""

    def __init__(
        self, specs: Sequence[GroupSpec], block_size: int, budget: int, *, prefix_caching: bool = True
    ) -> None:
        self.specs = tuple(specs)
        self.block_size = block_size
        self.budget = budget
        self.limit = budget  # what the budget may be raised to again
        self.prefix_caching = prefix_caching
        self.pools = tuple(BlockPool(1) for _ in specs)
        self._sequences: dict[int, SequenceKV] = {}
        self._moves: dict[tuple[int, int], int] = {}  # (group, destination): source, until the next flush
        self._sizes_changed = False

    # -- sizes ---------------------------------------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """Bytes of all pools as they are now, used or not."""
        return sum(p.num_blocks * s.bytes_per_block for p, s in zip(self.pools, self.specs, strict=True))

    @property
    def num_blocks(self) -> tuple[int, ...]:
        return tuple(pool.num_blocks for pool in self.pools)

    def max_blocks(self, group: int) -> int:
        """Blocks that the group could have for itself if the others kept their zero block only."""
        others = sum(s.bytes_per_block for g, s in enumerate(self.specs) if g != group)
        return max(0, (self.budget - others) // self.specs[group].bytes_per_block - 1)

    def blocks_for(self, num_tokens: int) -> list[int]:
        """Blocks of each group that a sequence of num_tokens holds at its peak, whatever its chunks are."""
        full = num_tokens // self.block_size
        # A window that ends with a full block touches window // block_size + 1, and decodes may add one before
        # a flush lets old ones go.
        return [full if s.window is None else min(full, s.window // self.block_size + 2) for s in self.specs]

    def bytes_alone(self, num_tokens: int) -> int:
        """Bytes that a sequence of num_tokens takes when it is alone, zero blocks included."""
        needs = self.blocks_for(num_tokens)
        return sum((n + 1) * s.bytes_per_block for n, s in zip(needs, self.specs, strict=True))

    def max_tokens_alone(self) -> int:
        """The longest sequence that fits when it is alone and the budget is at its limit (its last, partial block
        lives in the tail)."""
        low, high = 0, 1 << 30
        while low < high:  # needs grow with tokens, so bisect
            middle = (low + high + 1) // 2
            if self.bytes_alone(middle) <= self.limit:
                low = middle
            else:
                high = middle - 1
        return low

    def available(self, group: int) -> int:
        """Blocks that allocate() can still hand out, growth within the budget included."""
        room = max(0, self.budget - self.bytes_held) // self.specs[group].bytes_per_block
        return self.pools[group].num_available + room

    def can_allocate(self, needs: Sequence[int]) -> bool:
        """Whether all needs fit at once, growth of several groups out of the one budget included."""
        growth = 0
        for need, pool, spec in zip(needs, self.pools, self.specs, strict=True):
            growth += max(0, need - pool.num_available) * spec.bytes_per_block
        return growth == 0 or growth <= self.budget - self.bytes_held

    def _grow_for(self, needs: Sequence[int]) -> None:
        """Grow pools so that `needs` can be met, by growth rather than by eviction while the budget allows.

        What is lacking comes first in every group; what is left of the budget lets pools double.
        """
        lacking = [max(0, need - pool.num_available) for need, pool in zip(needs, self.pools, strict=True)]
        room = self.budget - self.bytes_held
        room -= sum(n * s.bytes_per_block for n, s in zip(lacking, self.specs, strict=True))
        for need, lack, pool, spec in zip(needs, lacking, self.pools, self.specs, strict=True):
            if need <= pool.num_free:
                continue
            step = FIRST_GROWTH if pool.num_blocks <= FIRST_GROWTH else pool.num_blocks
            share = room if len(self.pools) == 1 else room // 2  # leave other groups room for theirs
            extra = max(0, min(max(step, need) - lack, share // spec.bytes_per_block))
            if lack + extra:
                pool.grow(pool.num_blocks + lack + extra)
                room -= extra * spec.bytes_per_block
                self._sizes_changed = True

    # -- sequences -----------------------------------------------------------------------------------------

    def open(self, seq_id: int) -> SequenceKV:
        kv = SequenceKV([GroupTable() for _ in self.specs])
        kv.refresh_view(self.block_size)
        self._sequences[seq_id] = kv
        return kv

    def close(self, seq_id: int) -> None:
        """Give back every block, the last one first, so that a sequence's beginning is evicted last."""
        kv = self._sequences.pop(seq_id)
        for pool, table in zip(self.pools, kv.tables, strict=True):
            for block_id in reversed(table.ids):
                if block_id is not None:
                    pool.release(block_id)

    def fork(self, parent: int, child: int) -> SequenceKV:
        """The child shares all blocks of the parent, those included that are allocated but not yet written."""
        source = self._sequences[parent]
        kv = SequenceKV(
            [GroupTable(t.first, list(t.ids)) for t in source.tables],
            source.flushed,
            list(source.hashes),
            source.view,
        )
        for pool, table in zip(self.pools, kv.tables, strict=True):
            for block_id in table.ids:
                if block_id is not None:
                    pool.retain(block_id)
        self._sequences[child] = kv
        return kv

    def block_needs(self, kv: SequenceKV, end: int) -> list[int]:
        """New blocks of each group that positions up to `end` complete."""
        full = end // self.block_size
        return [
            sum(1 for b in range(t.end, full) if not self._left_of_window(g, b, end)) for g, t in enumerate(kv.tables)
        ]

    def allocate(self, kv: SequenceKV, end: int) -> bool:
        """Allocate every block that positions up to `end` complete. False, and nothing changed, if they don't fit."""
        full = end // self.block_size
        if all(t.end >= full for t in kv.tables):
            return True
        needs = self.block_needs(kv, end)
        if not self.can_allocate(needs):
            return False
        self._grow_for(needs)
        for group, table in enumerate(kv.tables):
            pool = self.pools[group]
            for number in range(table.end, full):
                table.ids.append(None if self._left_of_window(group, number, end) else pool.allocate())
        return True

    def _left_of_window(self, group: int, number: int, position: int) -> bool:
        """Whether no query at `position` or later sees any of block `number`."""
        window = self.specs[group].window
        return window is not None and (number + 1) * self.block_size <= position - window + 1

    def leave_behind(self, kv: SequenceKV, position: int) -> None:
        """Give back the blocks that no query at `position` (the next to be computed) or later sees.

        The view of `kv` still names them. So it must be replaced before the step at `position`; the step before may
        read them, because what is allocated from now on is written by the next plan's flush at the earliest.
        """
        for group, (pool, table) in enumerate(zip(self.pools, kv.tables, strict=True)):
            gone = 0
            while gone < len(table.ids) and self._left_of_window(group, table.first + gone, position):
                block_id = table.ids[gone]
                if block_id is not None:
                    pool.release(block_id)
                gone += 1
            if gone:
                table.drop_first(gone)

    def advance(self, kv: SequenceKV, flushed: int, position: int, token_ids: Sequence[int]) -> None:
        """Blocks up to `flushed` are written by the flush being planned: make them findable, and leave behind
        what `position`, the next to be computed, does not see. Flushes precede every read of their own step, so a
        hit in the same plan is safe."""
        size = self.block_size
        old = kv.flushed // size
        kv.flushed = flushed
        if self.prefix_caching:
            for number in range(old, flushed // size):
                content = block_content(token_ids[number * size : (number + 1) * size])
                if len(kv.hashes) == number:
                    kv.hashes.append(block_hash(kv.hashes[-1] if kv.hashes else ROOT, content))
                for pool, table in zip(self.pools, kv.tables, strict=True):
                    block_id = table.ids[number - table.first] if number >= table.first else None
                    if block_id is not None:
                        pool.index.add(kv.hashes[number], content, block_id)
        self.leave_behind(kv, position)
        kv.refresh_view(size)

    # -- prefix cache --------------------------------------------------------------------------------------

    def hash_prompt(self, kv_hashes: list[BlockHash], token_ids: Sequence[int]) -> None:
        """Extend the chain of hashes over every full block of token_ids that a hit may use.

        One token is always left to compute, hence (len - 1) // block_size blocks.
        """
        size = self.block_size
        for number in range(len(kv_hashes), (len(token_ids) - 1) // size):
            content = block_content(token_ids[number * size : (number + 1) * size])
            kv_hashes.append(block_hash(kv_hashes[-1] if kv_hashes else ROOT, content))

    def find_prefix(self, hashes: Sequence[BlockHash], token_ids: Sequence[int]) -> list[list[int | None]]:
        """For each group the blocks of the longest prefix that every group can serve; all of one length h.

        Full groups need blocks [0, h), a window group those that a query at h * block_size still sees
        (None for the others).
        """
        size = self.block_size
        limit = min(len(hashes), (len(token_ids) - 1) // size)
        found: list[list[int | None]] = []
        for spec, pool in zip(self.specs, self.pools, strict=True):
            blocks: list[int | None] = []
            for number in range(limit):
                block_id = pool.index.find(
                    hashes[number], block_content(token_ids[number * size : (number + 1) * size])
                )
                if block_id is None and spec.window is None:
                    break
                blocks.append(block_id)
            found.append(blocks)
            if spec.window is None:
                limit = min(limit, len(blocks))
        for length in range(limit, 0, -1):
            if all(self._window_covered(g, found[g], length) for g in range(len(self.specs))):
                return [
                    [None if self._left_of_window(g, n, length * size) else b for n, b in enumerate(blocks[:length])]
                    for g, blocks in enumerate(found)
                ]
        return [[] for _ in self.specs]

    def _window_covered(self, group: int, blocks: Sequence[int | None], length: int) -> bool:
        window = self.specs[group].window
        if window is None:
            return True
        first = max(0, length * self.block_size - window + 1) // self.block_size
        return all(block_id is not None for block_id in blocks[first:length])

    def take_prefix(self, kv: SequenceKV, blocks: Sequence[Sequence[int | None]], hashes: list[BlockHash]) -> int:
        """Hold the blocks that find_prefix named; returns the number of tokens they spare."""
        kv.hashes = hashes
        for pool, table, ids in zip(self.pools, kv.tables, blocks, strict=True):
            skip = next((n for n, block_id in enumerate(ids) if block_id is not None), len(ids))
            table.replace(skip, list(ids[skip:]))
            for block_id in table.ids:
                if block_id is not None:
                    pool.retain(block_id)
        kv.flushed = len(blocks[0]) * self.block_size if blocks else 0
        kv.refresh_view(self.block_size)
        return kv.flushed

    def hits_to_revive(self, blocks: Iterable[Iterable[int | None]]) -> list[int]:
        """How many blocks of a prefix, in each group, are cached only: holding them makes fewer available."""
        return [
            sum(1 for b in ids if b is not None and pool.is_cached(b))
            for pool, ids in zip(self.pools, blocks, strict=True)
        ]

    # -- moving memory -------------------------------------------------------------------------------------

    def rebalance(self, wanted: Sequence[int]) -> bool:
        """Shrink pools that exceed the budget, or whose idle blocks a group needs that lacks `wanted[g]` blocks.

        Call before a plan allocates anything: it moves used blocks and rewrites every table. Returns whether
        something moved or shrank.
        """
        lacking = sum(
            max(0, want - p.num_available) * s.bytes_per_block
            for want, p, s in zip(wanted, self.pools, self.specs, strict=True)
        )
        excess = self.bytes_held + lacking - self.budget
        changed = False
        for group in sorted(range(len(self.pools)), key=lambda g: -self._idle_bytes(g, wanted[g])):
            if excess <= 0:
                break
            pool, size = self.pools[group], self.specs[group].bytes_per_block
            idle = pool.num_available - wanted[group]
            cut = min(idle, -(-excess // size))
            if cut > 0:
                self._shrink(group, pool.num_blocks - cut)
                excess -= cut * size
                changed = True
        return changed

    def shrink_idle(self) -> bool:
        """Give back everything that no sequence holds, the prefix cache included."""
        changed = False
        for group, pool in enumerate(self.pools):
            if pool.num_available:
                self._shrink(group, pool.num_used + 1)
                changed = True
        return changed

    def _idle_bytes(self, group: int, wanted: int) -> int:
        return max(0, self.pools[group].num_available - wanted) * self.specs[group].bytes_per_block

    def _shrink(self, group: int, num_blocks: int) -> None:
        moves = dict(self.pools[group].shrink(num_blocks))
        self._sizes_changed = True
        if not moves:
            return
        for src, dst in moves.items():
            # A flush reads every source before it writes: a block that moved before in this plan moves but once.
            self._moves[group, dst] = self._moves.pop((group, src), src)
        for kv in self._sequences.values():
            table = kv.tables[group]
            table.replace(table.first, [moves.get(b, b) if b is not None else None for b in table.ids])
            kv.refresh_view(self.block_size)

    def take_changes(self) -> tuple[bool, tuple[BlockMove, ...]]:
        """Whether pool sizes changed since the last call, and the moves to make: they go into the next flush."""
        moves = tuple(BlockMove(group, src, dst) for (group, dst), src in self._moves.items())
        changed = self._sizes_changed
        self._sizes_changed, self._moves = False, {}
        return changed, moves

    def check(self) -> None:
        """Raise AssertionError unless pools and tables agree (every reference is some table's, and counted) and
        every window group holds no more than its window needs."""
        for pool in self.pools:
            pool.check()
        for group, pool in enumerate(self.pools):
            held: dict[int, int] = {}
            for kv in self._sequences.values():
                for block_id in kv.tables[group].ids:
                    if block_id is not None:
                        held[block_id] = held.get(block_id, 0) + 1
            for block_id in range(1, pool.num_blocks):
                if pool.refs(block_id) != held.get(block_id, 0):
                    raise AssertionError(
                        f"block {block_id} of group {group} has {pool.refs(block_id)} references, "
                        f"tables hold it {held.get(block_id, 0)} times"
                    )
            most = self.blocks_for(1 << 30)[group]
            for seq_id, kv in self._sequences.items():
                if kv.tables[group].num_held > most:
                    raise AssertionError(f"sequence {seq_id} holds more than {most} blocks of group {group}")
        if not self.prefix_caching and any(len(pool.index) for pool in self.pools):
            raise AssertionError("blocks are findable although prefix caching is off")
