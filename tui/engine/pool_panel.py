"""KV memory: in use, cached and free, and the map of the real pool."""

from __future__ import annotations

from mlxbatch.engine.snapshot import PoolState, Snapshot
from mlxbatch.tui.drawing import Line, Piece
from mlxbatch.tui.engine.pool_map import drawn_blocks, half_block_rows, map_rows
from mlxbatch.tui.engine.view_state import ViewState
from mlxbatch.tui.numbers import count, percent, size


def chosen_pool(snapshot: Snapshot, view: ViewState) -> PoolState | None:
    return snapshot.pools[view.group % len(snapshot.pools)] if snapshot.pools else None


def usable(pool: PoolState) -> int:
    """Blocks that can hold tokens: all but the reserved one."""
    return max(0, pool.total_blocks - 1)


def pool_title(snapshot: Snapshot, view: ViewState, per_cell: int) -> list[Piece]:
    pool = chosen_pool(snapshot, view)
    if pool is None:
        return [("KV blocks", "title")]
    name = "KV blocks" if len(snapshot.pools) == 1 else f"KV {pool.name}"
    cell = "1 block" if per_cell == 1 else f"{per_cell} blocks"
    return [
        (f"{name} ", "title"),
        (count(pool.in_use), "strong"),
        (f" of {count(usable(pool))} in use", "title"),
        (f" · 1 cell = {cell} = {count(per_cell * snapshot.model.block_size)} tokens", "dim"),
    ]


def pool_foot(snapshot: Snapshot, view: ViewState) -> list[Piece]:
    pool = chosen_pool(snapshot, view)
    if pool is None:
        return []
    return [
        (f"{count(pool.shared)} shared", "shared"),
        (" · ", "faint"),
        (f"{count(pool.own)} own", "text"),
        (" · ", "faint"),
        (f"{count(pool.cached)} cached", "cached"),
        (" · ", "faint"),
        (f"{count(pool.free)} free", "free"),
    ]


def pool_rows(snapshot: Snapshot, view: ViewState, width: int, height: int) -> tuple[list[Line], int]:
    """The map, then a legend and what lies outside the pool. Also how many blocks a cell stands for."""
    pool = chosen_pool(snapshot, view)
    if pool is None:
        return [Line(("no pool yet", "dim"))], 1
    rows, per_cell = compact_pool_rows(snapshot, view, width, height - 2)
    legend = Line(("1-9 slot", "slot0"), ("  ◆ shared by ≥2", "shared"), ("  ░ cached, evictable", "cached"))
    legend.add("  · free", "free").add("  ✕ just evicted", "bad")
    rows.append(legend)
    rows.append(_beside_the_pool(snapshot, pool, width))
    return rows, per_cell


def _beside_the_pool(snapshot: Snapshot, pool: PoolState, width: int) -> Line:
    tails, memory = snapshot.tails, snapshot.memory
    places = tails.slots * tails.tail_len
    line = Line((f"tails {count(tails.tokens)} of {count(places)} tokens", "text"))
    grown = f"grown to {count(drawn_blocks(pool))} of {count(usable(pool))} blocks"
    line.add(f" · {grown}" if pool.allocated_blocks < pool.total_blocks else " · fully grown", "dim")
    memory_text = f" · weights {size(memory.weights)} · pool {size(memory.pool)}" if memory.weights else ""
    if line.width + len(memory_text) <= width:
        line.add(memory_text, "dim")
    return line


def pool_height(snapshot: Snapshot, view: ViewState, width: int) -> int:
    """Rows of a frame that shows one block in each cell; more would stay empty."""
    pool = chosen_pool(snapshot, view)
    return -(-drawn_blocks(pool) // width) + 4 if pool is not None and width > 0 else 4


def compact_pool_title(snapshot: Snapshot, view: ViewState, per_cell: int) -> list[Piece]:
    """Title and figures in one line, for the layout without frames."""
    pool = chosen_pool(snapshot, view)
    if pool is None:
        return [("KV", "title")]
    name = "KV" if len(snapshot.pools) == 1 else f"KV {pool.name}"
    tails = snapshot.tails
    return [
        (f"{name} ", "title"),
        (count(pool.in_use), "strong"),
        (f"/{count(usable(pool))}", "title"),
        (f" · 1 cell = {per_cell} · ", "dim"),
        (f"{count(pool.shared)}◆ ", "shared"),
        (f"{count(pool.own)} own ", "text"),
        (f"{count(pool.cached)}░ ", "cached"),
        (f"{count(pool.free)}·", "free"),
        (f" · tails {count(tails.tokens)} tok", "dim"),
    ]


def compact_pool_rows(snapshot: Snapshot, view: ViewState, width: int, height: int) -> tuple[list[Line], int]:
    """The map alone."""
    pool = chosen_pool(snapshot, view)
    if pool is None:
        return [Line(("no pool yet", "dim"))], 1
    follow = view.follow if view.followed(snapshot) else None
    rows, per_cell = (
        half_block_rows(pool, width, height) if view.half_blocks else map_rows(pool, width, height, follow=follow)
    )
    return rows + [Line() for _ in range(height - len(rows))], per_cell


def pool_shares(snapshot: Snapshot) -> tuple[str, str]:
    """In use and cached, in percent of all blocks of all groups (by bytes)."""
    total = sum(usable(pool) * pool.bytes_per_block for pool in snapshot.pools)
    used = sum(pool.in_use * pool.bytes_per_block for pool in snapshot.pools)
    cached = sum(pool.cached * pool.bytes_per_block for pool in snapshot.pools)
    return percent(used, total), percent(cached, total)
