"""The block pool drawn as it is: every cell stands for a fixed number of blocks, in id order.

Only blocks that are allocated are drawn. What the budget still allows is a number beside the map: a pool
that has grown to a hundredth of its budget would be one mark in a field of dots.
"""

from __future__ import annotations

from mlxbatch.engine.snapshot import (
    BLOCK_CACHED,
    BLOCK_EVICTED,
    BLOCK_FREE,
    BLOCK_RESERVED,
    BLOCK_SHARED,
    PoolState,
)
from mlxbatch.tui.drawing import Line, Piece

_SLOT_MARKS = "123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SLOT_COLOURS = 8
_NO_CELL = -7


def slot_mark(slot: int) -> str:
    """One character for a slot: 1 to 9, then letters, # beyond."""
    return _SLOT_MARKS[slot] if slot < len(_SLOT_MARKS) else "#"


def slot_role(slot: int) -> str:
    return f"slot{slot % SLOT_COLOURS}"


def blocks_per_cell(pool: PoolState, cells: int) -> int:
    """Least number of blocks a cell must stand for, so that all allocated blocks fit."""
    return max(1, -(-drawn_blocks(pool) // cells)) if cells > 0 else 1


def drawn_blocks(pool: PoolState) -> int:
    """Allocated blocks but for the reserved one, which is never anybody's."""
    return max(0, pool.allocated_blocks - 1)


def pool_cells(pool: PoolState, per_cell: int) -> list[int]:
    """Owner of every cell, from block 1 (block 0 is reserved and left out).

    A cell of several blocks shows whatever holds most of its blocks in use; cached only where none is in
    use, free only where none is cached, so that even a single block in use is seen.
    """
    total = drawn_blocks(pool)
    tallies: list[dict[int, int]] = [{} for _ in range(-(-total // per_cell))]
    position = -1  # of the run's first block, with block 0 at -1
    for owner, length in pool.runs:
        start, end = max(position, 0), min(position + length, total)
        position += length
        if owner in (BLOCK_FREE, BLOCK_RESERVED):
            continue
        while start < end:
            cell = start // per_cell
            upto = min(end, (cell + 1) * per_cell)
            tallies[cell][owner] = tallies[cell].get(owner, 0) + upto - start
            start = upto
    return [_winner(tally) for tally in tallies]


def _winner(tally: dict[int, int]) -> int:
    used = {owner: blocks for owner, blocks in tally.items() if owner >= 0 or owner == BLOCK_SHARED}
    if used:
        return max(used, key=lambda owner: (used[owner], owner == BLOCK_SHARED))
    if BLOCK_EVICTED in tally:
        return BLOCK_EVICTED
    return BLOCK_CACHED if BLOCK_CACHED in tally else BLOCK_FREE


def cell_piece(owner: int) -> Piece:
    """Mark and role of a cell; the mark alone tells the owner."""
    if owner >= 0:
        return slot_mark(owner), slot_role(owner)
    if owner == BLOCK_SHARED:
        return "◆", "shared"
    if owner == BLOCK_CACHED:
        return "░", "cached"
    if owner == BLOCK_EVICTED:
        return "✕", "bad"
    return ("·", "free") if owner == BLOCK_FREE else (" ", "text")


def map_rows(pool: PoolState, width: int, height: int, *, follow: int | None = None) -> tuple[list[Line], int]:
    """The map in `height` rows of `width` cells, and how many blocks a cell stands for.

    With `follow`, the cells of other slots step back to a dim mark.
    """
    per_cell = blocks_per_cell(pool, width * height)
    cells = pool_cells(pool, per_cell)
    rows = []
    for start in range(0, min(len(cells), width * height), width):
        line = Line()
        for owner, length in _runs(cells[start : start + width]):
            mark, role = cell_piece(owner)
            if follow is not None and owner >= 0 and owner != follow:
                role = "faint"
            line.add(mark * length, role)
        rows.append(line)
    return rows, per_cell


def half_block_rows(pool: PoolState, width: int, height: int) -> tuple[list[Line], int]:
    """The map at twice the height: two cells in each character, told apart by colour only."""
    per_cell = blocks_per_cell(pool, width * height * 2)
    cells = pool_cells(pool, per_cell)
    cells += [_NO_CELL] * (-len(cells) % (2 * width))
    rows = []
    for start in range(0, len(cells), 2 * width):
        line = Line()
        for upper, lower in zip(cells[start : start + width], cells[start + width : start + 2 * width], strict=True):
            line.add("▀", f"{_half_role(upper)}|{_half_role(lower)}")
        rows.append(line)
    return rows, per_cell


def _half_role(owner: int) -> str:
    return "nothing" if owner == _NO_CELL else cell_piece(owner)[1]


def _runs(cells: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for owner in cells:
        if runs and runs[-1][0] == owner:
            runs[-1] = (owner, runs[-1][1] + 1)
        else:
            runs.append((owner, 1))
    return runs
