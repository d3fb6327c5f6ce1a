"""The map of the block pool shows the pool: every cell is checked against the blocks it stands for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.engine.snapshot import (
    BLOCK_CACHED,
    BLOCK_EVICTED,
    BLOCK_FREE,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    PoolState,
)
from mlxbatch.tui.engine.pool_map import (
    blocks_per_cell,
    half_block_rows,
    map_rows,
    pool_cells,
    slot_mark,
)

OWNERS = st.sampled_from([BLOCK_FREE, BLOCK_CACHED, BLOCK_SHARED, BLOCK_EVICTED, 0, 1, 7, 70])


def pool_of(owners: list[int]) -> PoolState:
    runs: list[tuple[int, int]] = [(BLOCK_RESERVED, 1)]
    for owner in owners:
        last, length = runs[-1]
        if last == owner:
            runs[-1] = (owner, length + 1)
        else:
            runs.append((owner, 1))
    return PoolState(total_blocks=len(owners) + 1, allocated_blocks=len(owners) + 1, runs=tuple(runs))


@given(st.lists(OWNERS, max_size=200))
def test_one_block_a_cell_is_the_pool_itself(owners: list[int]) -> None:
    assert pool_cells(pool_of(owners), 1) == owners


@given(st.lists(OWNERS, min_size=1, max_size=300), st.integers(1, 40), st.integers(1, 6))
def test_every_cell_speaks_for_its_blocks(owners: list[int], width: int, height: int) -> None:
    pool = pool_of(owners)
    per_cell = blocks_per_cell(pool, width * height)
    cells = pool_cells(pool, per_cell)
    assert len(cells) == -(-len(owners) // per_cell) <= width * height
    for index, cell in enumerate(cells):
        blocks = owners[index * per_cell : (index + 1) * per_cell]
        used = [owner for owner in blocks if owner >= 0 or owner == BLOCK_SHARED]
        assert cell in blocks
        if used:  # not even one block in use goes unseen
            assert used.count(cell) == max(used.count(owner) for owner in used)
        elif cell == BLOCK_FREE:
            assert set(blocks) == {BLOCK_FREE}


@given(st.lists(OWNERS, max_size=300), st.integers(1, 40), st.integers(1, 6))
def test_the_map_fits(owners: list[int], width: int, height: int) -> None:
    rows, _ = map_rows(pool_of(owners), width, height)
    assert len(rows) <= height
    assert all(row.width <= width for row in rows)
    rows, _ = half_block_rows(pool_of(owners), width, height)
    assert len(rows) <= height
    assert all(row.width == width for row in rows)


def test_marks() -> None:
    pool = pool_of([BLOCK_SHARED, 0, 8, 9, 70, BLOCK_CACHED, BLOCK_EVICTED, BLOCK_FREE])
    rows, per_cell = map_rows(pool, 20, 1)
    assert (rows[0].text, per_cell) == ("◆19a#░✕·", 1)
    assert slot_mark(8) == "9"


def test_a_followed_slot_stands_out() -> None:
    (row,), _ = map_rows(pool_of([0, 1, BLOCK_SHARED]), 20, 1, follow=1)
    assert [role for _, role in row.pieces] == ["faint", "slot1", "shared"]
    assert row.text == "12◆"


def test_only_allocated_blocks_are_drawn() -> None:
    grown = PoolState(total_blocks=10_000, allocated_blocks=9, runs=((BLOCK_RESERVED, 1), (3, 2), (BLOCK_FREE, 6)))
    rows, per_cell = map_rows(grown, 40, 4)
    assert ([row.text for row in rows], per_cell) == (["44······"], 1)
