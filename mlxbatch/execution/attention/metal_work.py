"""What the decode kernels need besides K and V: work lists, row tables and constants, as padded device arrays.

A chunk is a fixed range of positions, [c * CHUNK_TOKENS, (c + 1) * CHUNK_TOKENS), wherever they are stored. A
row's result is then a function of its own context alone: not of its neighbours, and not of when blocks were
flushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2
from typing import Any

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec, ChunkLayout, DecodeLayout, LayerKV
from mlxbatch.execution.attention.metal_blocks import QuantizedLayerKV

CHUNK_TOKENS = 256
LOG2_E = log2(e)
NO_WINDOW = 1 << 30
MIN_ELEMENTS = 8  # MLX puts smaller inputs into the `constant` space, which changes a kernel's signature


def padded(values: mx.array) -> mx.array:
    """The flat array, with zeros behind it up to MIN_ELEMENTS."""
    flat = values.reshape(-1)
    return mx.pad(flat, (0, MIN_ELEMENTS - flat.size)) if flat.size < MIN_ELEMENTS else flat


def int_array(values: Sequence[int]) -> mx.array:
    return mx.array([*values, *[0] * (MIN_ELEMENTS - len(values))], dtype=mx.int32)


def float_array(values: Sequence[float]) -> mx.array:
    return mx.array([*values, *[0.0] * (MIN_ELEMENTS - len(values))], dtype=mx.float32)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Device arrays that stay the same until rows or tables change. `items` [W, 2]: row and chunk number;
    `row_chunks` [R, 2]: a row's first item and their number; `row_info` [R, 3]: slot, flushed, first block."""

    items: mx.array
    row_chunks: mx.array
    row_info: mx.array
    tables: mx.array
    table_width: int
    num_items: int
    num_rows: int

    @property
    def needs_merge(self) -> bool:
        return self.num_items > self.num_rows


def chunk_range(flushed: int, first_block: int, block_size: int, tail_len: int, chunk: int) -> range:
    """Chunks that a row can reach before its next flush: its tail holds at most tail_len positions."""
    return range(first_block * block_size // chunk, -(-(flushed + tail_len) // chunk))


def decode_work(layout: DecodeLayout, kv: LayerKV, chunk: int) -> DecodeWork:
    """The layout's work list, built once and kept in `layout.stable`."""
    key = ("metal", kv.block_size, kv.tail_len, chunk)
    work = layout.stable.get(key)
    if work is None:
        items: list[int] = []
        row_chunks: list[int] = []
        for row, (flushed, first) in enumerate(zip(layout.host_flushed, layout.host_first, strict=True)):
            chunks = chunk_range(flushed, first, kv.block_size, kv.tail_len, chunk)
            row_chunks += (len(items) // 2, len(chunks))
            for number in chunks:
                items += (row, number)
        work = layout.stable[key] = DecodeWork(
            items=int_array(items),
            row_chunks=int_array(row_chunks),
            row_info=padded(mx.stack([layout.slots, layout.flushed, layout.first_block], axis=1)),
            tables=padded(layout.tables),
            table_width=int(layout.tables.shape[1]),
            num_items=len(items) // 2,
            num_rows=len(layout.host_flushed),
        )
    return work


def row_lengths(layout: DecodeLayout) -> mx.array:
    """The layout's lengths, padded; once a step."""
    key = ("metal", "lengths")
    if key not in layout.step:
        layout.step[key] = padded(layout.lengths)
    return layout.step[key]


def chunk_table(layout: ChunkLayout) -> mx.array:
    """The chunk's block table, padded; once a step."""
    key = ("metal", "table")
    if key not in layout.step:
        layout.step[key] = padded(layout.table)
    return layout.step[key]


def ints_in(cache: dict[Any, Any], values: tuple[int, ...]) -> mx.array:
    """`values` on the device, kept in a layout's `stable` or `step` and dropped with it."""
    key = ("metal", values)
    if key not in cache:
        cache[key] = int_array(values)
    return cache[key]


def score_factors(spec: AttentionSpec) -> tuple[float, float]:
    """What the kernels multiply a dot product by, before and after the soft-cap's tanh (0: no soft-cap)."""
    if spec.softcap:
        return spec.scale / spec.softcap, spec.softcap * LOG2_E
    return spec.scale * LOG2_E, 0.0


class Constants:
    """Small device arrays that layers ask for at every step, by value."""

    def __init__(self) -> None:
        self._floats: dict[tuple[float, ...], mx.array] = {}
        self._nothing: dict[mx.Dtype, mx.array] = {}
        self.no_sinks = float_array([])

    def floats(self, *values: float) -> mx.array:
        if values not in self._floats:
            self._floats[values] = float_array(values)
        return self._floats[values]

    def nothing(self, dtype: mx.Dtype) -> mx.array:
        if dtype not in self._nothing:
            self._nothing[dtype] = mx.zeros(MIN_ELEMENTS, dtype=dtype)
        return self._nothing[dtype]


KV_INPUTS = ("pool_k", "pool_v", "k_scales", "v_scales", "tail_k", "tail_v")


def kv_inputs(kv: LayerKV, constants: Constants) -> list[mx.array]:
    """A layer's memory in the order of KV_INPUTS."""
    if isinstance(kv, QuantizedLayerKV):
        scales = [kv.k_scales, kv.v_scales]
    else:
        scales = [constants.nothing(kv.tail_k.dtype)] * 2
    return [kv.pool_k, kv.pool_v, *scales, kv.tail_k, kv.tail_v]


def kv_template(kv: LayerKV, key_dim: int, value_dim: int) -> list[tuple[str, object]]:
    """The template arguments that every attention kernel has."""
    bits = kv.bits if isinstance(kv, QuantizedLayerKV) else 0
    return [("T", kv.tail_k.dtype), ("BITS", bits), ("D", key_dim), ("DV", value_dim)]
