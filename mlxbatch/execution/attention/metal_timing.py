"""How long attention takes on this machine's GPU, for the choice at load and for `mlxbatch doctor --kernels`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxbatch.execution.attention.layout import ChunkLayout, DecodeLayout, LayerKV, PagedAttention
from mlxbatch.execution.attention.metal_blocks import (
    QuantizedLayerKV,
    quantize_key_blocks,
    quantize_value_blocks,
)
from mlxbatch.execution.attention.metal_check import Variant

CALLS_PER_MEASUREMENT = 8  # in one evaluation, so that its fixed cost does not count
MEASUREMENTS = 3
DECODE_ROWS = 8
DECODE_CONTEXT = 2048
PREFILL_CONTEXT = 1024
PREFILL_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, and the bytes of K and V that it has to read at least."""

    seconds: float
    kv_bytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.kv_bytes / self.seconds


def time_variant(variant: Variant, attention: PagedAttention) -> Timing:
    """The fastest of a few measurements, after one call that compiles."""
    make = _prefill_call if variant.operation.startswith("prefill") else _decode_call
    context = PREFILL_CONTEXT if variant.operation.startswith("prefill") else DECODE_CONTEXT
    rows = 1 if variant.operation.startswith("prefill") else DECODE_ROWS
    call = make(variant, attention, context)
    mx.eval(call())
    best = float("inf")
    for _ in range(MEASUREMENTS):
        started = time.perf_counter()
        mx.eval([call() for _ in range(CALLS_PER_MEASUREMENT)])
        best = min(best, (time.perf_counter() - started) / CALLS_PER_MEASUREMENT)
    seen = min(context, variant.spec.window or context)
    return Timing(best, rows * int(seen * _token_bytes(variant)))


def _token_bytes(variant: Variant) -> float:
    """Bytes of K and V of one position, with the scales that quantised ones share."""
    elements = variant.kv_heads * (variant.key_dim + variant.value_dim)
    if not variant.bits:
        return float(elements * variant.dtype.size)
    scales = 2 * variant.dtype.size * variant.kv_heads * (variant.key_dim / variant.block_size + 1)
    return elements * variant.bits / 8 + scales


def kernels_are_faster(variant: Variant, kernels: PagedAttention, reference: PagedAttention) -> bool:
    return time_variant(variant, kernels).seconds <= time_variant(variant, reference).seconds


def _memory(variant: Variant, rows: int, context: int) -> tuple[LayerKV, list[list[int]]]:
    """Every row has `context` positions in blocks of its own and an empty tail."""
    blocks = context // variant.block_size
    pool = (rows * blocks + 1, variant.kv_heads, variant.block_size)
    tail = (rows, variant.kv_heads, variant.tail_len)
    arrays = [
        mx.random.normal((*shape, dim)).astype(variant.dtype)
        for shape in (pool, tail)
        for dim in (variant.key_dim, variant.value_dim)
    ]
    tables = [[1 + row + rows * i for i in range(blocks)] for row in range(rows)]
    kv = LayerKV(*arrays)
    if variant.bits:
        codes_k, scales_k = quantize_key_blocks(kv.pool_k, variant.bits)
        codes_v, scales_v = quantize_value_blocks(kv.pool_v, variant.bits)
        kv = QuantizedLayerKV(codes_k, codes_v, kv.tail_k, kv.tail_v, scales_k, scales_v, variant.bits)
        arrays = [codes_k, codes_v, kv.tail_k, kv.tail_v, scales_k, scales_v]
    mx.eval(arrays)
    return kv, tables


def _queries(variant: Variant, rows: int, count: int) -> list[mx.array]:
    dims = (variant.key_dim, variant.value_dim) if variant.is_latent else (variant.key_dim,)
    queries = [
        mx.random.normal((rows, variant.query_heads, count, dim)).astype(variant.dtype) for dim in dims
    ]
    mx.eval(queries)
    return queries


def _sinks(variant: Variant) -> mx.array | None:
    return mx.zeros(variant.query_heads, variant.dtype) if variant.has_sinks else None


def _decode_call(variant: Variant, attention: PagedAttention, context: int) -> Callable[[], mx.array]:
    kv, tables = _memory(variant, DECODE_ROWS, context)
    queries, sinks = _queries(variant, DECODE_ROWS, variant.q_len), _sinks(variant)
    flushed, length = context - variant.block_size, context
    first = (
        max(0, length - variant.q_len - variant.spec.window + 1) // variant.block_size
        if variant.spec.window
        else 0
    )
    rows = tuple(range(DECODE_ROWS))

    def full(value: int) -> mx.array:
        return mx.full((DECODE_ROWS,), value, mx.int32)

    layout = DecodeLayout(
        slots=mx.array(rows, mx.int32),
        tables=mx.array([table[first:] for table in tables], mx.int32),
        first_block=full(first),
        flushed=full(flushed),
        lengths=full(length),
        host_slots=rows,
        host_flushed=(flushed,) * DECODE_ROWS,
        host_first=(first,) * DECODE_ROWS,
        host_lengths=(length,) * DECODE_ROWS,
    )

    def call() -> mx.array:
        step = replace(layout, step={})  # a step's own arrays are made anew, as in a real step
        if variant.is_latent:
            return attention.decode_latent(queries[0], queries[1], kv, step, variant.spec)
        return attention.decode(queries[0], kv, step, variant.spec, sinks)

    return call


def _prefill_call(variant: Variant, attention: PagedAttention, context: int) -> Callable[[], mx.array]:
    kv, tables = _memory(variant, 1, context)
    queries, sinks = _queries(variant, 1, PREFILL_TOKENS), _sinks(variant)
    shape = (1, variant.kv_heads, PREFILL_TOKENS)
    k = mx.random.normal((*shape, variant.key_dim)).astype(variant.dtype)
    v = mx.random.normal((*shape, variant.value_dim)).astype(variant.dtype)
    table = mx.array(tables[0], mx.int32)
    mx.eval(k, v, table)

    def call() -> mx.array:
        layout = ChunkLayout(0, table, 0, context, context, PREFILL_TOKENS)
        if variant.is_latent:
            return attention.prefill_latent(queries[0], queries[1], k, v, kv, layout, variant.spec)
        return attention.prefill(queries[0], k, v, kv, layout, variant.spec, sinks)

    return call
