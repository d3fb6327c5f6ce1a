"""Block ids of one KV group: who holds them, which are free, which can still be found."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from mlxbatch.scheduling.plan import ZERO_BLOCK
from mlxbatch.scheduling.prefix import PrefixIndex


class BlockPool:
    """Every id from 1 to num_blocks - 1 is in exactly one state:

        free     no references, holds nothing     lowest id handed out first, so that a pool can shrink
        cached   no references, still findable    evicted least recently used first
        used     one reference or more

    Id 0 is the zero block that padding points at; it is never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError("a pool holds at least the zero block")
        self._refs: list[int] = [0] * num_blocks
        # Free are the ids in `_returned`, a heap, and those from `_fresh` on, which were never handed out since the
        # pool was cut to them. All of `_returned` lies below `_fresh`. So growing costs nothing by its size.
        self._returned: list[int] = []
        self._fresh = 1
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.index = PrefixIndex()
        self.evictions = 0

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        return len(self._returned) + self.num_blocks - self._fresh

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        return self.num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def allocate(self) -> int:
        """A block with one reference; evicts the least recently used cached block if none is free.

        Raises IndexError when nothing is available: callers reserve first.
        """
        if self._returned:
            block_id = heapq.heappop(self._returned)
        elif self._fresh < self.num_blocks:
            block_id = self._fresh
            self._fresh += 1
        elif self._cached:
            block_id, _ = self._cached.popitem(last=False)
            self.index.remove(block_id)
            self.evictions += 1
        else:
            raise IndexError("no block is available")
        self._refs[block_id] = 1
        return block_id

    def retain(self, block_id: int) -> None:
        """One more reference to a used or cached block."""
        if self._refs[block_id] == 0:
            del self._cached[block_id]  # KeyError: the block holds nothing that could be shared
        self._refs[block_id] += 1

    def release(self, block_id: int) -> None:
        """One reference less. A findable block whose last reference goes becomes the most recently used."""
        if self._refs[block_id] < 1:
            raise ValueError(f"block {block_id} has no reference to release")
        self._refs[block_id] -= 1
        if self._refs[block_id] == 0:
            if block_id in self.index:
                self._cached[block_id] = None
            else:
                heapq.heappush(self._returned, block_id)

    def grow(self, num_blocks: int) -> None:
        """Add free ids up to num_blocks - 1."""
        self._refs += [0] * (num_blocks - self.num_blocks)

    def shrink(self, num_blocks: int) -> list[tuple[int, int]]:
        """Cut the ids from num_blocks up; returns (src, dst) moves of used blocks, for data and tables.

        Cached blocks above the cut are forgotten. Raises ValueError when the used blocks do not fit.
        """
        if self.num_used > num_blocks - 1:
            raise ValueError(f"{self.num_used} used blocks do not fit into {num_blocks - 1}")
        for block_id in [b for b in self._cached if b >= num_blocks]:
            del self._cached[block_id]
            self.index.remove(block_id)
        self._returned = [b for b in self._returned if b < num_blocks]
        heapq.heapify(self._returned)
        self._fresh = min(self._fresh, num_blocks)
        held = [(src, refs) for src, refs in enumerate(self._refs[num_blocks:], num_blocks) if refs]
        del self._refs[num_blocks:]
        moves = []
        for src, refs in held:
            dst = self.allocate()
            self._refs[dst] = refs
            self.index.move(src, dst)
            moves.append((src, dst))
        return moves

    def forget_cached(self) -> None:
        """Free every cached block."""
        while self._cached:
            block_id, _ = self._cached.popitem(last=False)
            self.index.remove(block_id)
            heapq.heappush(self._returned, block_id)

    def check(self) -> None:
        """Raise AssertionError unless the class invariants hold."""
        free, cached = {*self._returned, *range(self._fresh, self.num_blocks)}, set(self._cached)
        used = {b for b, refs in enumerate(self._refs) if refs > 0}
        everything = set(range(1, self.num_blocks))
        if len(free) != self.num_free:
            raise AssertionError("a block is free twice")
        if not max(self._returned, default=0) < self._fresh <= self.num_blocks:
            raise AssertionError("a block that was never handed out was given back")
        if free & cached or free & used or cached & used or (free | cached | used) != everything:
            raise AssertionError("free, cached and used do not partition the pool")
        if self._refs[ZERO_BLOCK] != 0 or min(self._refs) < 0:
            raise AssertionError("the zero block is held, or a count is negative")
        findable = self.index.block_ids()
        if not cached <= findable or findable & free:
            raise AssertionError("cached blocks must be findable and free blocks must not")
