"""The keys and values of one row as plain arrays, for attention that the paged implementations do not have.

Costs a copy of the row's context, so adapters use it only where nothing else gives the model's own answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, DecodeLayout, LayerKV
from mlxbatch.execution.attention.reference import chunk_context

_EVERYTHING = AttentionSpec(scale=1.0)


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """Flat tokens [begin, end) of a pass are positions [start, start + end - begin) of one sequence. keys
    [1, Hk, n, D] and values [1, Hk, n, Dv] are of positions [first, first + n), the last ones the tokens' own.
    Positions left of the layer's window may hold anything."""

    begin: int
    end: int
    start: int
    first: int
    keys: mx.array
    values: mx.array

    @property
    def key_positions(self) -> mx.array:
        return mx.arange(self.first, self.first + self.keys.shape[2])

    @property
    def query_positions(self) -> mx.array:
        """[end - begin, 1]"""
        return mx.arange(self.start, self.start + self.end - self.begin)[:, None]


def decode_row(kv: LayerKV, layout: DecodeLayout, row: int) -> RowContext:
    """`kv` as it is after the step's write."""
    flushed, first, length = (
        host[row] for host in (layout.host_flushed, layout.host_first, layout.host_lengths)
    )
    size = kv.block_size
    ids = layout.tables[row, : flushed // size - first]
    places = mx.array(np.arange(flushed, length) % kv.tail_len)

    def joined(pool: mx.array, tail: mx.array) -> mx.array:
        blocks = pool[ids].swapaxes(0, 1).reshape(1, pool.shape[1], -1, pool.shape[3])
        return mx.concatenate([blocks, tail[layout.host_slots[row]][None, :, places]], axis=2)

    keys, values = joined(kv.pool_k, kv.tail_k), joined(kv.pool_v, kv.tail_v)
    return RowContext(row, row + 1, length - 1, first * size, keys, values)


def chunk_row(
    kv: LayerKV, layout: ChunkLayout, begin: int, keys: mx.array, values: mx.array
) -> RowContext:
    """`kv` as it was before the step's write; keys and values are the chunk's own, [1, Hk, n, D]."""
    return RowContext(
        begin,
        begin + layout.num_tokens,
        layout.start,
        layout.first_block * kv.block_size,
        chunk_context(kv.pool_k, kv.tail_k, keys, layout, _EVERYTHING),
        chunk_context(kv.pool_v, kv.tail_v, values, layout, _EVERYTHING),
    )
