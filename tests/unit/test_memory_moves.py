"""Block moves of one plan: a pool that shrinks more than once before the flush."""

from __future__ import annotations

from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec


def test_a_block_that_moves_twice_before_the_flush_is_moved_once() -> None:
    """A flush reads all sources before it writes, so 6 -> 4 and then 4 -> 1 must become 6 -> 1."""
    kv = KVMemory([GroupSpec("full", (0,), None, 10)], 4, budget=1000, prefix_caching=False)
    first, second, third = (kv.open(n) for n in range(3))
    assert kv.allocate(first, 12)  # blocks 1, 2, 3
    assert kv.allocate(second, 8)  # 4, 5
    assert kv.allocate(third, 8)  # 6, 7
    kv.take_changes()
    kv.close(1)
    kv.budget = 60  # ids 0 to 5
    kv.rebalance([0])
    assert sorted(b for b in third.tables[0].ids if b) == [4, 5]
    kv.close(0)
    kv.budget = 30
    kv.rebalance([0])
    assert sorted(b for b in third.tables[0].ids if b) == [1, 2]
    _, moves = kv.take_changes()
    content = {block: block for block in range(8)}
    read = [content[move.src] for move in moves]
    for move, value in zip(moves, read, strict=True):
        content[move.dst] = value
    assert [content[b] for b in third.tables[0].ids if b] == [6, 7]
    kv.check()
