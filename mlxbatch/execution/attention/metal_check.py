"""Compares a kernel variant with the reference on small random memory: NaN wherever nothing valid is stored, but
for block 0, which pads tables and holds zeros in the engine too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxbatch.execution.attention.layout import (
    AttentionSpec,
    ChunkLayout,
    DecodeLayout,
    LayerKV,
    PagedAttention,
)
from mlxbatch.execution.attention.metal_blocks import (
    QuantizedLayerKV,
    dequantize_key_blocks,
    dequantize_value_blocks,
    quantize_key_blocks,
    quantize_value_blocks,
)

# A wrong kernel is off by the size of a value, about 1. Rounding stays well below these.
TOLERANCE = {mx.float32: 2e-3, mx.float16: 5e-3, mx.bfloat16: 4e-2}
CHUNK_LENGTH = 21
BLOCKS_BEFORE_CHUNK = 3
POSITIONS_BEFORE_CHUNK = 5  # beyond those blocks: a chunk may start anywhere


@dataclass(frozen=True, slots=True)
class Variant:
    """What decides which kernel runs and how. Latent attention has dims (512, 64) and one KV head."""

    operation: str  # decode, prefill, decode_latent or prefill_latent
    dtype: mx.Dtype
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    tail_len: int
    q_len: int
    spec: AttentionSpec
    has_sinks: bool = False
    bits: int = 0  # of quantised pool blocks; 0: dense

    @property
    def is_latent(self) -> bool:
        return self.operation.endswith("_latent")

    @property
    def name(self) -> str:
        """As warnings and tables show it."""
        parts = [
            self.operation.replace("_", " "),
            str(self.dtype).rpartition(".")[2],
            f"heads {self.query_heads}/{self.kv_heads}",
            f"dims {self.key_dim}/{self.value_dim}",
            f"blocks of {self.block_size}",
        ]
        if self.bits:
            parts.append(f"int{self.bits} blocks")
        if self.q_len > 1 and self.operation.startswith("decode"):
            parts.append(f"{self.q_len} queries a row")
        if self.spec.window:
            parts.append(f"window {self.spec.window}")
        if self.spec.softcap:
            parts.append("soft-cap")
        if self.has_sinks:
            parts.append("sinks")
        return ", ".join(parts)


def check_variant(
    variant: Variant, implementation: PagedAttention, reference: PagedAttention, chunk_tokens: int
) -> float:
    """The largest deviation of `implementation` from `reference`, relative for values above 1; inf for NaN.
    Quantised blocks are compared with their dequantised values. Whatever the kernels raise, also when they do
    not compile, passes through."""
    memory = _Memory(variant)
    if variant.operation.startswith("prefill"):
        return memory.compare_prefill(implementation, reference)
    short = [variant.q_len, variant.block_size + 5, 3 * variant.block_size]
    one_chunk = memory.compare_decode(implementation, reference, short)
    return max(one_chunk, memory.compare_decode(implementation, reference, [*short, chunk_tokens + 9]))


class _Memory:
    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._random = np.random.default_rng(0)

    def _normal(self, *shape: int) -> mx.array:
        values = self._random.standard_normal(shape).astype(np.float32)
        return mx.array(values).astype(self._variant.dtype)

    def _queries(self, rows: int, count: int) -> list[mx.array]:
        variant = self._variant
        q = self._normal(rows, variant.query_heads, count, variant.key_dim)
        if not variant.is_latent:
            return [q]
        rope = self._normal(rows, variant.query_heads, count, variant.value_dim)
        return [q, (rope * variant.spec.scale).astype(variant.dtype)]

    def _sinks(self) -> mx.array | None:
        variant = self._variant
        return self._normal(variant.query_heads) if variant.has_sinks else None

    def _fill(self, lengths: Sequence[int], flushed: Sequence[int]) -> tuple[LayerKV, list[list[int]]]:
        """Row i in tail slot i; blocks are handed out from the last id down."""
        variant = self._variant
        num_blocks = sum(n // variant.block_size for n in flushed) + 1
        arrays = []
        for dim in (variant.key_dim, variant.value_dim):
            pool = np.zeros((num_blocks, variant.kv_heads, variant.block_size, dim), np.float32)
            tail = np.full((len(lengths), variant.kv_heads, variant.tail_len, dim), np.nan, np.float32)
            pool[1:] = self._random.standard_normal((num_blocks - 1, *pool.shape[1:]))
            for row, (length, done) in enumerate(zip(lengths, flushed, strict=True)):
                ring = np.arange(done, length) % variant.tail_len
                tail[row][:, ring] = self._random.standard_normal((variant.kv_heads, len(ring), dim))
            arrays += [mx.array(pool).astype(variant.dtype), mx.array(tail).astype(variant.dtype)]
        tables: list[list[int]] = []
        last = num_blocks - 1
        for done in flushed:
            tables.append(list(range(last, last - done // variant.block_size, -1)))
            last -= len(tables[-1])
        return LayerKV(arrays[0], arrays[2], arrays[1], arrays[3]), tables

    def _quantized(self, kv: LayerKV) -> tuple[LayerKV, LayerKV]:
        """What the kernels read, and the same values for the reference."""
        bits = self._variant.bits
        if not bits:
            return kv, kv
        key_codes, key_scales = quantize_key_blocks(kv.pool_k, bits)
        value_codes, value_scales = quantize_value_blocks(kv.pool_v, bits)
        dense = LayerKV(
            dequantize_key_blocks(key_codes, key_scales, bits),
            dequantize_value_blocks(value_codes, value_scales, bits),
            kv.tail_k,
            kv.tail_v,
        )
        return QuantizedLayerKV(
            key_codes, value_codes, kv.tail_k, kv.tail_v, key_scales, value_scales, bits
        ), dense

    def compare_decode(
        self, implementation: PagedAttention, reference: PagedAttention, lengths: list[int]
    ) -> float:
        variant = self._variant
        block = variant.block_size
        held = variant.tail_len - block + 1
        flushed = [max(0, n - held) // block * block for n in lengths]
        kv, tables = self._fill(lengths, flushed)
        width = max(1, *(len(t) for t in tables))
        rows = range(len(lengths))
        first = [0 for _ in rows]
        if variant.spec.window:  # blocks left of the window have been given back
            first = [
                min(max(0, n - variant.q_len - variant.spec.window + 1), f) // block
                for n, f in zip(lengths, flushed, strict=True)
            ]
            tables = [t[skip:] for t, skip in zip(tables, first, strict=True)]
        queries, sinks = self._queries(len(lengths), variant.q_len), self._sinks()
        coded, kv = self._quantized(kv)

        def run(attention: PagedAttention, kv: LayerKV) -> mx.array:
            layout = DecodeLayout(
                slots=mx.array(list(rows), mx.int32),
                tables=mx.array([t + [0] * (width - len(t)) for t in tables], mx.int32),
                first_block=mx.array(first, mx.int32),
                flushed=mx.array(flushed, mx.int32),
                lengths=mx.array(lengths, mx.int32),
                host_slots=tuple(rows),
                host_flushed=tuple(flushed),
                host_first=tuple(first),
                host_lengths=tuple(lengths),
            )
            if variant.is_latent:
                return attention.decode_latent(queries[0], queries[1], kv, layout, variant.spec)
            return attention.decode(queries[0], kv, layout, variant.spec, sinks)

        return deviation(run(implementation, coded), run(reference, kv))

    def compare_prefill(self, implementation: PagedAttention, reference: PagedAttention) -> float:
        variant = self._variant
        flushed = BLOCKS_BEFORE_CHUNK * variant.block_size
        start = flushed + POSITIONS_BEFORE_CHUNK
        kv, tables = self._fill([start], [flushed])
        queries, sinks = self._queries(1, CHUNK_LENGTH), self._sinks()
        k = self._normal(1, variant.kv_heads, CHUNK_LENGTH, variant.key_dim)
        v = self._normal(1, variant.kv_heads, CHUNK_LENGTH, variant.value_dim)
        coded, kv = self._quantized(kv)

        def run(attention: PagedAttention, kv: LayerKV) -> mx.array:
            layout = ChunkLayout(0, mx.array(tables[0], mx.int32), 0, flushed, start, CHUNK_LENGTH)
            if variant.is_latent:
                return attention.prefill_latent(queries[0], queries[1], k, v, kv, layout, variant.spec)
            return attention.prefill(queries[0], k, v, kv, layout, variant.spec, sinks)

        return deviation(run(implementation, coded), run(reference, kv))


def deviation(got: mx.array, expected: mx.array) -> float:
    """The largest error, relative for values above 1; inf for NaN."""
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    error = mx.max(mx.abs(got - expected) / mx.maximum(1.0, mx.abs(expected)))
    return float("inf") if mx.isnan(error).item() else float(np.array(error))
