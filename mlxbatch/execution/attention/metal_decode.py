"""Launches paged_attention_decode and, when some row has several chunks, paged_attention_merge."""

from __future__ import annotations

import mlx.core as mx

from mlxbatch.execution.attention.layout import AttentionSpec, DecodeLayout, LayerKV
from mlxbatch.execution.attention.metal_source import KernelFactory, load_kernel_source
from mlxbatch.execution.attention.metal_work import (
    KV_INPUTS,
    NO_WINDOW,
    Constants,
    DecodeWork,
    decode_work,
    ints_in,
    kv_inputs,
    kv_template,
    padded,
    row_lengths,
    score_factors,
)

SIMDGROUPS = 4
TILE = 8  # queries in one matrix fragment
ACCUMULATOR_CHANNELS = 256  # tiles * value width that a simdgroup keeps in registers: 64 floats a lane

DECODE_INPUTS = (
    "queries",
    *KV_INPUTS,
    "tables",
    "row_info",
    "row_length",
    "work",
    "dims",
    "factors",
    "sink_logits",
)
MERGE_INPUTS = ("partials", "stats", "row_chunks", "dims", "sink_logits")


def query_tiles(num_queries: int, value_dim: int) -> int:
    """Tiles of 8 queries that one threadgroup takes: 1, 2 or 4, as many as are needed and fit."""
    fit = max(1, ACCUMULATOR_CHANNELS // value_dim)
    needed = -(-num_queries // TILE)
    return next(tiles for tiles in (4, 2, 1) if tiles <= fit and (tiles // 2 < needed or tiles == 1))


class DecodeKernels:
    """Decode attention over K and V apart. `chunk_tokens` is a multiple of 16."""

    def __init__(self, kernel_factory: KernelFactory, constants: Constants, chunk_tokens: int) -> None:
        decode = load_kernel_source("paged_attention_decode")
        self._decode = kernel_factory(
            name=decode.name,
            input_names=DECODE_INPUTS,
            output_names=("attended", "stats"),
            source=decode.body,
            header=decode.header,
        )
        self._merge = MergeKernel(kernel_factory)
        self._constants = constants
        self._chunk = chunk_tokens

    def __call__(
        self, q: mx.array, kv: LayerKV, layout: DecodeLayout, spec: AttentionSpec, sinks: mx.array | None
    ) -> mx.array:
        rows, heads, q_len, key_dim = q.shape
        dtype = kv.tail_k.dtype
        kv_heads, value_dim = kv.tail_k.shape[1], kv.tail_v.shape[3]
        num_queries = heads // kv_heads * q_len
        work = decode_work(layout, kv, self._chunk)
        tiles = query_tiles(num_queries, value_dim)
        values = (
            kv_heads,
            heads // kv_heads,
            q_len,
            kv.block_size.bit_length() - 1,
            kv.tail_len,
            work.table_width,
            spec.window or NO_WINDOW,
            self._chunk,
            int(sinks is not None),
        )
        sink_logits = self._constants.no_sinks if sinks is None else padded(sinks.astype(mx.float32))
        dims = ints_in(layout.stable, values)
        direct = not work.needs_merge
        shape = (rows, heads, q_len, value_dim)
        attended, stats = self._decode(
            inputs=[
                q.astype(dtype),
                *kv_inputs(kv, self._constants),
                work.tables,
                work.row_info,
                row_lengths(layout),
                work.items,
                dims,
                self._constants.floats(*score_factors(spec)),
                sink_logits,
            ],
            template=[
                *kv_template(kv, key_dim, value_dim),
                ("Out", dtype if direct else mx.float32),
                ("TILES", tiles),
                ("SIMDGROUPS", SIMDGROUPS),
                ("DIRECT", direct),
            ],
            grid=(32 * SIMDGROUPS * -(-num_queries // (TILE * tiles)), kv_heads, work.num_items),
            threadgroup=(32 * SIMDGROUPS, 1, 1),
            output_shapes=[
                shape if direct else (work.num_items, heads * q_len, value_dim),
                (work.num_items, heads * q_len, 2),
            ],
            output_dtypes=[dtype if direct else mx.float32, mx.float32],
        )
        if not direct:
            attended = self._merge(attended, stats, work, dims, sink_logits, shape, dtype)
        return attended.astype(q.dtype)


class MergeKernel:
    """Combines the chunks of each row."""

    def __init__(self, kernel_factory: KernelFactory) -> None:
        merge = load_kernel_source("paged_attention_merge")
        self._kernel = kernel_factory(
            name=merge.name,
            input_names=MERGE_INPUTS,
            output_names=("attended",),
            source=merge.body,
            header=merge.header,
        )

    def __call__(
        self,
        partials: mx.array,
        stats: mx.array,
        work: DecodeWork,
        dims: mx.array,
        sink_logits: mx.array,
        shape: tuple[int, int, int, int],
        dtype: mx.Dtype,
    ) -> mx.array:
        rows, heads, q_len, value_dim = shape
        return self._kernel(
            inputs=[partials, stats, work.row_chunks, dims, sink_logits],
            template=[("T", dtype), ("DV", value_dim), ("SIMDGROUPS", SIMDGROUPS)],
            grid=(32 * SIMDGROUPS, heads * q_len, rows),
            threadgroup=(32 * SIMDGROUPS, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )[0]
