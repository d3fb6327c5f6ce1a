"""Random KV memory for kernel tests: every number outside the valid tokens is NaN, but for the zero block 0 that
tables are padded with; block ids are shuffled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from oracle import attention

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

LATENT, ROPE = 512, 64


@dataclass(frozen=True)
class Case:
    """One kind of layer and of memory. `bits` 0 is a dense pool; `latent` ignores the head dims and kv_heads."""

    dtype: str = "float16"
    key_dim: int = 128
    value_dim: int = 128
    kv_heads: int = 2
    group: int = 4
    block_size: int = 16
    tail_blocks: int = 2
    bits: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False

    @property
    def scale(self) -> float:
        return float((LATENT + ROPE if self.latent else self.key_dim) ** -0.5)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.scale, self.window, self.softcap)

    @property
    def tail_len(self) -> int:
        return self.tail_blocks * self.block_size

    @property
    def mlx_dtype(self) -> mx.Dtype:
        return getattr(mx, self.dtype)


@dataclass
class Sequence_:
    """What one sequence holds: keys [Hk, n, D], values [Hk, n, Dv] as read back (float64), and where."""

    keys: np.ndarray
    values: np.ndarray
    slot: int
    first_block: int
    flushed: int
    table: list[int]


def numpy64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


class Scene:
    """`lengths[i]` positions are stored for sequence i; its oldest query stands at `oldest[i]`, so that a window
    has let go of the blocks before. `unflushed` fixes how many newest positions must be in the tail."""

    def __init__(
        self,
        case: Case,
        lengths: Sequence[int],
        oldest: Sequence[int],
        seed: int = 0,
        unflushed: int | None = None,
    ) -> None:
        self.case = case
        # Apart, so that contents, queries and sinks do not depend on where the contents are stored, nor a row's
        # on the rows after it.
        self._places, self._contents, self._queries, self._sinks = (
            np.random.default_rng([seed, stream]) for stream in range(4)
        )
        if case.latent:
            case = replace(case, kv_heads=1, key_dim=LATENT, value_dim=ROPE)
        heads, block = case.kv_heads, case.block_size
        plans = [self._plan(case, n, q, unflushed) for n, q in zip(lengths, oldest, strict=True)]
        counts = [flushed // block - first for first, flushed in plans]
        ids = self._places.permutation(sum(counts)) + 1
        slots = self._places.permutation(len(lengths) + 1)
        dense_k = np.full((len(ids) + 1, heads, block, case.key_dim), np.nan)
        dense_v = np.full((len(ids) + 1, heads, block, case.value_dim), np.nan)
        dense_k[0] = dense_v[0] = 0
        self._codes = self._code_arrays(case, len(ids) + 1) if case.bits else None
        tail_k = np.full((len(lengths) + 1, heads, case.tail_len, case.key_dim), np.nan)
        tail_v = np.full((len(lengths) + 1, heads, case.tail_len, case.value_dim), np.nan)
        self.sequences: list[Sequence_] = []
        given = 0
        for i, ((first, flushed), count) in enumerate(zip(plans, counts, strict=True)):
            table = [int(x) for x in ids[given : given + count]]
            given += count
            keys = self.random(heads, lengths[i], case.key_dim)
            values = self.random(heads, lengths[i], case.value_dim)
            keys64, values64 = numpy64(keys), numpy64(values)
            oldest_seen = max(0, oldest[i] - case.window + 1) if case.window else 0
            for number, block_id in enumerate(table, start=first):
                span = slice(number * block, (number + 1) * block)
                if self._codes:
                    keys64[:, span], values64[:, span] = self._quantize(
                        block_id, keys[:, span], values[:, span]
                    )
                seen = slice(max(span.start, oldest_seen), span.stop)
                inside = slice(seen.start - span.start, None)
                dense_k[block_id, :, inside] = keys64[:, seen]
                dense_v[block_id, :, inside] = values64[:, seen]
            for position in range(flushed, lengths[i]):
                tail_k[slots[i], :, position % case.tail_len] = keys64[:, position]
                tail_v[slots[i], :, position % case.tail_len] = values64[:, position]
            self.sequences.append(Sequence_(keys64, values64, int(slots[i]), first, flushed, table))
        tails = self._array(tail_k), self._array(tail_v)
        if self._codes:
            codes_k, codes_v, scales_k, scales_v = self._codes
            self.kv: LayerKV = QuantizedLayerKV(
                mx.array(codes_k),
                mx.array(codes_v),
                *tails,
                self._array(scales_k),
                self._array(scales_v),
                case.bits,
            )
        else:
            self.kv = LayerKV(self._array(dense_k), self._array(dense_v), *tails)

    def _plan(self, case: Case, length: int, oldest: int, unflushed: int | None) -> tuple[int, int]:
        """First block and flushed length: any that the engine may reach."""
        block = case.block_size
        held = (
            unflushed if unflushed is not None else int(self._places.integers(0, case.tail_len - block + 1))
        )
        least = -(-max(0, length - case.tail_len) // block) * block
        flushed = max(least, max(0, min(length - held, oldest)) // block * block)
        first = max(0, oldest - case.window + 1) // block if case.window else 0
        return min(first, flushed // block), flushed

    def _code_arrays(self, case: Case, blocks: int) -> tuple[np.ndarray, ...]:
        heads, size = case.kv_heads, case.block_size
        return (
            np.full((blocks, heads, size, case.key_dim * case.bits // 8), 255, np.uint8),
            np.full((blocks, heads, size, case.value_dim * case.bits // 8), 255, np.uint8),
            np.full((blocks, heads, 2, case.key_dim), np.nan),
            np.full((blocks, heads, size, 2), np.nan),
        )

    def _quantize(self, block_id: int, keys: mx.array, values: mx.array) -> tuple[np.ndarray, np.ndarray]:
        bits = self.case.bits
        codes_k, scales_k = quantize_key_blocks(keys, bits)
        codes_v, scales_v = quantize_value_blocks(values, bits)
        assert self._codes is not None
        for array, part in zip(self._codes, (codes_k, codes_v), strict=False):
            array[block_id] = np.array(part)
        for array, part in zip(self._codes[2:], (scales_k, scales_v), strict=True):
            array[block_id] = numpy64(part)
        return (
            numpy64(dequantize_key_blocks(codes_k, scales_k, bits)),
            numpy64(dequantize_value_blocks(codes_v, scales_v, bits)),
        )

    def random(self, *shape: int) -> mx.array:
        return self._array(self._contents.standard_normal(shape))

    def _array(self, values: np.ndarray) -> mx.array:
        return mx.array(values.astype(np.float32)).astype(self.case.mlx_dtype)

    def sinks(self) -> mx.array | None:
        case = self.case
        if not case.sinks:
            return None
        return mx.array(self._sinks.standard_normal(case.kv_heads * case.group).astype(np.float32))

    def expected(
        self,
        queries: list[np.ndarray],
        i: int,
        positions: np.ndarray,
        sinks: mx.array | None,
        extra: list[np.ndarray],
    ) -> np.ndarray:
        """queries and extra: one or two parts (latent: latent and rotary), extra K and V behind what is stored."""
        case, stored = self.case, self.sequences[i]
        keys, values = stored.keys, stored.values
        if extra:
            keys, values = np.concatenate([keys, extra[0]], 1), np.concatenate([values, extra[1]], 1)
        options = {"window": case.window, "softcap": case.softcap}
        if case.latent:
            both = np.concatenate([queries[0] * case.scale, queries[1]], -1)
            return attention(both, np.concatenate([keys, values], -1), keys, positions, scale=1.0, **options)
        logits = None if sinks is None else numpy64(sinks)
        return attention(queries[0], keys, values, positions, scale=case.scale, sinks=logits, **options)

    def queries(self, rows: int, count: int) -> list[mx.array]:
        """One array, or for latent attention two: the latent part and the rotary one, which is scaled already."""
        case = self.case
        heads = case.group if case.latent else case.kv_heads * case.group
        width = LATENT + ROPE if case.latent else case.key_dim
        both = self._queries.standard_normal((rows, heads, count, width))
        if not case.latent:
            return [self._array(both)]
        return [self._array(both[..., :LATENT]), self._array(both[..., LATENT:] * case.scale)]


def decode_scene(
    case: Case, lengths: Sequence[int], q_len: int = 1, seed: int = 0, unflushed: int | None = None
) -> tuple[Scene, DecodeLayout]:
    scene = Scene(case, lengths, [n - q_len for n in lengths], seed, unflushed)
    rows = scene.sequences
    width = max(1, max(len(row.table) for row in rows))
    ints = {
        "host_slots": tuple(row.slot for row in rows),
        "host_first": tuple(row.first_block for row in rows),
        "host_flushed": tuple(row.flushed for row in rows),
        "host_lengths": tuple(int(n) for n in lengths),
    }
    tables = [row.table + [0] * (width - len(row.table)) for row in rows]
    return scene, DecodeLayout(
        slots=mx.array(ints["host_slots"], mx.int32),
        tables=mx.array(tables, mx.int32),
        first_block=mx.array(ints["host_first"], mx.int32),
        flushed=mx.array(ints["host_flushed"], mx.int32),
        lengths=mx.array(ints["host_lengths"], mx.int32),
        **ints,
    )


def run_decode(
    implementation: PagedAttention,
    case: Case,
    lengths: Sequence[int],
    q_len: int = 1,
    seed: int = 0,
    unflushed: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What `implementation` gives and what the oracle expects, [rows, Hq, q_len, Dv]."""
    scene, layout = decode_scene(case, lengths, q_len, seed, unflushed)
    queries, sinks = scene.queries(len(lengths), q_len), scene.sinks()
    if case.latent:
        got = implementation.decode_latent(*queries, scene.kv, layout, case.spec)
    else:
        got = implementation.decode(*queries, scene.kv, layout, case.spec, sinks)
    expected = [
        scene.expected([numpy64(q)[i] for q in queries], i, np.arange(n - q_len, n), sinks, [])
        for i, n in enumerate(lengths)
    ]
    return numpy64(got), np.stack(expected)


def run_prefill(
    implementation: PagedAttention,
    case: Case,
    start: int,
    count: int,
    seed: int = 0,
    unflushed: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """A chunk of `count` tokens behind `start` stored ones: result and oracle, [Hq, count, Dv]."""
    scene = Scene(case, [start], [start], seed, unflushed)
    row = scene.sequences[0]
    table = mx.array(row.table or [0], mx.int32)
    layout = ChunkLayout(row.slot, table, row.first_block, row.flushed, start, count)
    queries, sinks = scene.queries(1, count), scene.sinks()
    heads = 1 if case.latent else case.kv_heads
    key_dim, value_dim = (LATENT, ROPE) if case.latent else (case.key_dim, case.value_dim)
    keys, values = scene.random(1, heads, count, key_dim), scene.random(1, heads, count, value_dim)
    if case.latent:
        got = implementation.prefill_latent(*queries, keys, values, scene.kv, layout, case.spec)
    else:
        got = implementation.prefill(*queries, keys, values, scene.kv, layout, case.spec, sinks)
    expected = scene.expected(
        [numpy64(q)[0] for q in queries],
        0,
        np.arange(start, start + count),
        sinks,
        [numpy64(keys)[0], numpy64(values)[0]],
    )
    return numpy64(got)[0], expected
