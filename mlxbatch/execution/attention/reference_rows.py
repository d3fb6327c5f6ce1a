"""Where the decode rows of a step find their keys: rows by length, tail places, masks.

Rows of about the same length form a class, so that one long row does not make every row as long.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxbatch.execution.attention.layout import DecodeLayout

# Cost of one more length class, in blocks that padding to the longest row would read in vain.
_CLASS_COST_BLOCKS = 24


@dataclass(frozen=True, slots=True, eq=False)
class LengthClass:
    """Rows with about as many pool blocks. `rows` is None when the class holds every row, in order.

    `tables` [Rc, blocks] int32: a row's missing blocks are replaced by its first. `query_index` and
    `block_index` [Rc, blocks, Hk] uint32 pick the matrices of queries [R * Hk] and pool blocks [N * Hk].
    `positions` int32 [Rc, 1, 1, blocks * B]. `valid` of the same shape marks positions that exist; None
    where all do.
    """

    rows: mx.array | None
    num_blocks: int
    tables: mx.array
    query_index: mx.array
    block_index: mx.array
    positions: mx.array
    valid: mx.array | None


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    classes: tuple[LengthClass, ...]
    restore: mx.array | None  # index that puts the classes' rows back into the layout's order


def tail_places(
    layout: DecodeLayout, kv_heads: int, tail_len: int, window: int | None, q_len: int
) -> tuple[mx.array, mx.array | None]:
    """Where the rows' tail positions are, as far as the longest row needs: index [R, Hk, U] into the tail's
    (slot, head, ring) rows and mask [R, 1, q_len, U], None if every query sees every entry. Entries that no
    query sees point at the newest token."""
    key = ("reference", kv_heads, tail_len, window, q_len)
    found = layout.step.get(key)
    if found is None:
        slots, flushed, lengths = (
            np.array(host, np.int32)[:, None]
            for host in (layout.host_slots, layout.host_flushed, layout.host_lengths)
        )
        position = flushed + np.arange(int((lengths - flushed).max()), dtype=np.int32)
        newest = lengths - 1
        # [R, q_len, U]: what each of the row's queries sees
        query = (newest - np.arange(q_len - 1, -1, -1, dtype=np.int32))[:, :, None]
        mask = position[:, None] <= query
        if window is not None:
            mask &= position[:, None] > query - window
        ring = np.where(mask.any(axis=1), position, newest) % tail_len
        heads = slots * kv_heads + np.arange(kv_heads, dtype=np.int32)
        index = mx.array(heads[:, :, None] * tail_len + ring[:, None])
        found = index, None if mask.all() else mx.array(mask[:, None])
        layout.step[key] = found
    return found


def row_plan(layout: DecodeLayout, heads: int, kv_heads: int, block_size: int) -> RowPlan:
    key = ("reference", heads, kv_heads)
    found = layout.stable.get(key)
    if found is None:
        found = _make_row_plan(layout, heads, kv_heads, block_size)
        layout.stable[key] = found
    return found


def _make_row_plan(layout: DecodeLayout, heads: int, kv_heads: int, block_size: int) -> RowPlan:
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
        _length_class(layout, order[a:b], tables, blocks, heads, kv_heads, block_size, whole=len(cuts) == 2)
        for a, b in itertools.pairwise(cuts)
    )
    restore = None if len(cuts) == 2 else mx.array(np.argsort(order).astype(np.int32))
    return RowPlan(classes, restore)


def _length_class(
    layout: DecodeLayout,
    rows: np.ndarray,
    tables: np.ndarray,
    blocks: np.ndarray,
    heads: int,
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
    head = np.arange(heads)
    query_index = np.broadcast_to((rows[:, None] * heads + head)[:, None], (len(rows), width, heads))
    block_index = own[:, :, None] * kv_heads + head // (heads // kv_heads)
    return LengthClass(
        rows=None if whole else mx.array(rows.astype(np.int32)),
        num_blocks=width,
        tables=mx.array(own.astype(np.int32)),
        query_index=mx.array(query_index.astype(np.uint32)),
        block_index=mx.array(block_index.astype(np.uint32)),
        positions=mx.array(position.astype(np.int32)),
        valid=None if exists.all() else mx.array(valid),
    )


def pool_mask(
    rows: LengthClass, layout: DecodeLayout, window: int | None, q_len: int
) -> tuple[mx.array | None, mx.array | None]:
    """Which pool positions each query sees, [Rc, 1, 1 or q_len, K]; and, within a window, which of them any
    query sees, [Rc, blocks, 1, B, 1]: values elsewhere may be anything."""
    if window is None:
        return rows.valid, None
    key = ("reference", id(rows), window, q_len)
    found = layout.step.get(key)
    if found is None:
        lengths = layout.lengths if rows.rows is None else layout.lengths[rows.rows]
        query = lengths[:, None, None, None] - 1 - mx.arange(q_len - 1, -1, -1)[:, None]
        mask = rows.positions > query - window
        if rows.valid is not None:
            mask = mask & rows.valid
        readable = mask[:, :, :1].reshape(mask.shape[0], rows.num_blocks, 1, -1, 1)
        found = mask, readable
        layout.step[key] = found
    return found
