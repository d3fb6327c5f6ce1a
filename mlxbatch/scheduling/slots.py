"""Tail slots: one for each running sequence."""

from __future__ import annotations

import heapq


class SlotPool:
    """Hands out the lowest free slot, so that the tail arrays can follow the rows in use."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self._free = list(range(max_slots))
        self._used: set[int] = set()
        self._num_slots = 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        slot = heapq.heappop(self._free)
        self._used.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._used.remove(slot)
        heapq.heappush(self._free, slot)

    def num_slots(self) -> int:
        """Slots that the tail arrays must have: the power of two that holds the highest in use, at most max_slots.

        Shrinks only when three quarters would stay empty: a resize rewrites every tail.
        """
        highest = max(self._used, default=0)
        needed = 1 << highest.bit_length()
        if needed > self._num_slots or needed * 4 <= self._num_slots:
            self._num_slots = needed
        return min(self._num_slots, self.max_slots)

    def resize(self, max_slots: int) -> None:
        """Change the number of slots; slots in use above it stay until they are released."""
        used_or_new = range(max_slots)
        self._free = [s for s in used_or_new if s not in self._used]
        heapq.heapify(self._free)
        self.max_slots = max(max_slots, max(self._used, default=0) + 1)
