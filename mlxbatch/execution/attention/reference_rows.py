"""Where the decode rows of a step find their keys: rows by length, tail places, masks.

Rows of about the same length form a class, so that one long row does not make every row as long.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxbatch.execution.attention.layout import DecodeLayout

# Slots, heads and ring indices of tail entries, int32 of one shape.
Index = tuple[mx.array, ...]

# Cost of one more length class, in blocks that padding to the longest row would read in vain.
_CLASS_COST_BLOCKS = 24


@dataclass(frozen=True, slots=True, eq=False)
class LengthClass:
    """Rows with about as many pool blocks. `rows` is None when the class holds every row, in order.

    `tables` [Rc, blocks] int32: a row's missing blocks are replaced by its first. `query_index`, `block_index` and
    `weight_index` [Rc, Hk, blocks] uint32 pick the matrices of queries [R * Hk], of pool blocks [N * Hk], and of
    weights [Rc * Hk * blocks] (each in its place).
    `positions` int32 [Rc, 1, 1, blocks * B]. `bias` float32 of the same shape is -inf at positions that do not
    exist, else 0; None where all exist.
    """

    rows: mx.array | None
    num_blocks: int
    tables: mx.array
    query_index: mx.array
    block_index: mx.array
    weight_index: mx.array
    positions: mx.array
    bias: mx.array | None


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    classes: tuple[LengthClass, ...]
    restore: mx.array | None  # index that puts the classes' rows back into the layout's order


def tail_places(
    layout: DecodeLayout, kv_heads: int, tail_len: int, window: int | None, q_len: int, group: int
) -> tuple[Index, mx.array | None]:
    """Where the rows' tail positions are, as far as the longest row needs: an index [R, Hk, U] and what to add to
    scores, [R, 1, 1 or M, U]: -inf where a query does not see an entry; None if every query sees every entry.
    Entries that no query sees point at the newest token, so no score is anything but finite."""
    key = ("reference", kv_heads, tail_len, window, q_len, group)
    found = layout.step.get(key)
    if found is None:
        flushed, lengths = (
            np.array(host, np.int32)[:, None] for host in (layout.host_flushed, layout.host_lengths)
        )
        position = flushed + np.arange(int((lengths - flushed).max()), dtype=np.int32)
        newest = lengths - 1
        # [R, q_len, U]: what each of the row's queries sees
        query = (newest - np.arange(q_len - 1, -1, -1, dtype=np.int32))[:, :, None]
        mask = position[:, None] <= query
        if window is not None:
            mask &= position[:, None] > query - window
        ring = np.where(mask.any(axis=1), position, newest) % tail_len
        shape = (len(ring), kv_heads, ring.shape[1])
        heads = mx.arange(kv_heads, dtype=mx.int32)[:, None]
        places = layout.slots[:, None, None], heads, mx.array(ring)[:, None]
        index = tuple(mx.broadcast_to(part, shape) for part in places)
        tiled = mask if q_len == 1 else np.tile(mask, (1, group, 1))
        found = index, None if mask.all() else _bias(tiled[:, None])
        layout.step[key] = found
    return found


def _bias(seen: np.ndarray) -> mx.array:
    """What to add to scores: 0 where seen, else -inf."""
    return mx.array(np.where(seen, np.float32(0.0), np.float32(-np.inf)))


def row_plan(layout: DecodeLayout, kv_heads: int, block_size: int) -> RowPlan:
    key = ("reference", kv_heads)
    found = layout.stable.get(key)
    if found is None:
        found = _make_row_plan(layout, kv_heads, block_size)
        layout.stable[key] = found
    return found


def _make_row_plan(layout: DecodeLayout, kv_heads: int, block_size: int) -> RowPlan:
    blocks = np.array(layout.host_flushed) // block_size - np.array(layout.host_first)
    order = np.argsort(-blocks, kind="stable")
    cuts = [0]
    for index in range(1, len(order)):
        longest, own = blocks[order[cuts[-1]]], blocks[order[index]]
        # A row without blocks has none of its own to read in place of the missing ones.
        if (longest - own) * (len(order) - index) > _CLASS_COST_BLOCKS or (longest and not own):
            cuts.append(index)
    cuts.append(len(order))
    if len(cuts) == 2:
        order = np.arange(len(order))
    tables = np.array(layout.tables)
    classes = tuple(
        _length_class(layout, order[a:b], tables, blocks, kv_heads, block_size, whole=len(cuts) == 2)
        for a, b in itertools.pairwise(cuts)
    )
    restore = None if len(cuts) == 2 else mx.array(np.argsort(order).astype(np.int32))
    return RowPlan(classes, restore)


def _length_class(
    layout: DecodeLayout,
    rows: np.ndarray,
    tables: np.ndarray,
    blocks: np.ndarray,
    kv_heads: int,
    block_size: int,
    *,
    whole: bool,
) -> LengthClass:
    width = int(blocks[rows].max())
    exists = np.arange(width) < blocks[rows][:, None]
    # A missing block is read, with weight zero, as the row's own first block: never another sequence's.
    own = np.where(exists, tables[rows, :width], tables[rows, :1])
    position = (np.array(layout.host_first)[rows][:, None] + np.arange(width)) * block_size
    position = (position[:, :, None] + np.arange(block_size)).reshape(len(rows), 1, 1, -1)
    valid = np.repeat(exists, block_size, axis=1)[:, None, None]
    head = np.arange(kv_heads)[:, None]
    query_index = np.broadcast_to(rows[:, None, None] * kv_heads + head, (len(rows), kv_heads, width))
    block_index = own[:, None] * kv_heads + head
    return LengthClass(
        rows=None if whole else mx.array(rows.astype(np.int32)),
        num_blocks=width,
        tables=mx.array(own.astype(np.int32)),
        query_index=mx.array(query_index.astype(np.uint32)),
        block_index=mx.array(block_index.astype(np.uint32)),
        weight_index=mx.arange(block_index.size, dtype=mx.uint32).reshape(block_index.shape),
        positions=mx.array(position.astype(np.int32)),
        bias=None if exists.all() else _bias(valid),
    )


def pool_mask(
    rows: LengthClass, layout: DecodeLayout, window: int | None, q_len: int, group: int
) -> tuple[mx.array | None, mx.array | None]:
    """Which pool positions each query sees, [Rc, 1, 1 or M, K]; and, within a window, which of them any
    query sees, [Rc, blocks, 1, B, 1]: keys and values elsewhere may be anything, so the mask is boolean then."""
    if window is None:
        return rows.bias, None
    key = ("reference", id(rows), window, q_len, group)
    found = layout.step.get(key)
    if found is None:
        lengths = layout.lengths if rows.rows is None else layout.lengths[rows.rows]
        query = lengths[:, None, None, None] - 1 - mx.arange(q_len - 1, -1, -1)[:, None]
        mask = rows.positions > query - window
        if rows.bias is not None:
            mask = mask & (rows.bias == 0)
        readable = mask[:, :, :1].reshape(mask.shape[0], rows.num_blocks, 1, -1, 1)
        found = mask if q_len == 1 else mx.tile(mask, (1, 1, group, 1)), readable
        layout.step[key] = found
    return found
