"""The reference attention against attention by definition, with inf and NaN wherever it must not look."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import mlx.core as mx  # noqa: E402

from mlxbatch.execution.attention.layout import (  # noqa: E402
    AttentionSpec,
    ChunkLayout,
    DecodeLayout,
    LayerKV,
)
from mlxbatch.execution.attention.reference import ReferenceAttention  # noqa: E402

NUM_BLOCKS = 60
SLOTS = 9


@dataclass
class Row:
    """One sequence: K and V of its first `length` positions, of which `flushed` are in the pool."""

    slot: int
    length: int
    flushed: int
    first: int
    table: list[int]
    k: np.ndarray  # [length, Hk, D]
    v: np.ndarray


@dataclass
class Memory:
    """Pool and tails filled with garbage, then with the rows' valid positions only."""

    rng: np.random.Generator
    block_size: int
    kv_heads: int
    k_dim: int
    v_dim: int
    tail_len: int = 0

    def __post_init__(self) -> None:
        self.tail_len = 2 * self.block_size
        garbage = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
        shape = (NUM_BLOCKS, self.kv_heads, self.block_size)
        self.pool_k = self.rng.choice(garbage, (*shape, self.k_dim))
        self.pool_v = self.rng.choice(garbage, (*shape, self.v_dim))
        tail_shape = (SLOTS, self.kv_heads, self.tail_len)
        self.tail_k = self.rng.choice(garbage, (*tail_shape, self.k_dim))
        self.tail_v = self.rng.choice(garbage, (*tail_shape, self.v_dim))
        self.free = list(range(1, NUM_BLOCKS))
        self.rng.shuffle(self.free)

    def add(self, slot: int, length: int, flushed: int, window: int | None, oldest_query: int) -> Row:
        size = self.block_size
        low = 0 if window is None else max(0, oldest_query - window + 1)
        first = min(low, flushed) // size
        k = self.rng.standard_normal((length, self.kv_heads, self.k_dim), np.float32)
        v = self.rng.standard_normal((length, self.kv_heads, self.v_dim), np.float32)
        table = [self.free.pop() for _ in range(flushed // size - first)]
        for position in range(low, length):
            if position < flushed:
                place = (table[position // size - first], slice(None), position % size)
                self.pool_k[place], self.pool_v[place] = k[position], v[position]
            else:
                ring = (slot, slice(None), position % self.tail_len)
                self.tail_k[ring], self.tail_v[ring] = k[position], v[position]
        return Row(slot, length, flushed, first, table, k, v)

    def kv(self, dtype: mx.Dtype) -> LayerKV:
        arrays = (self.pool_k, self.pool_v, self.tail_k, self.tail_v)
        return LayerKV(*(mx.array(array).astype(dtype) for array in arrays))


def by_definition(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, first_query: int, spec: AttentionSpec, sinks: np.ndarray | None
) -> np.ndarray:
    """q [Hq, n, D] at positions first_query.., k and v [positions, Hk, D] -> [Hq, n, Dv], in float64."""
    heads, queries, _ = q.shape
    out = np.zeros((heads, queries, v.shape[2]))
    for head in range(heads):
        kv_head = head * k.shape[1] // heads
        for index in range(queries):
            position = first_query + index
            low = 0 if spec.window is None else max(0, position - spec.window + 1)
            scores = k[low : position + 1, kv_head].astype(np.float64) @ q[head, index] * spec.scale
            if spec.softcap is not None:
                scores = np.tanh(scores / spec.softcap) * spec.softcap
            logits = scores if sinks is None else np.append(scores, sinks[head])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[head, index] = weights[: len(scores)] @ v[low : position + 1, kv_head]
    return out


def decode_layout(rows: list[Row]) -> DecodeLayout:
    width = max(1, *(len(row.table) for row in rows))
    columns = [[getattr(row, name) for row in rows] for name in ("slot", "first", "flushed", "length")]
    tables = [row.table + [0] * (width - len(row.table)) for row in rows]
    slots, first, flushed, lengths = (mx.array(column) for column in columns)
    return DecodeLayout(
        slots, mx.array(tables), first, flushed, lengths, *(tuple(columns[i]) for i in (0, 2, 1, 3))
    )


CASES = {
    "grouped": (4, 2, 16, 16, AttentionSpec(0.25)),
    "one-kv-head": (6, 1, 8, 8, AttentionSpec(0.3)),
    "other-v-width": (4, 4, 12, 8, AttentionSpec(0.3)),
    "window": (4, 2, 16, 16, AttentionSpec(0.25, window=11)),
    "window-of-blocks": (4, 2, 16, 16, AttentionSpec(0.25, window=16)),
    "softcap": (4, 2, 16, 16, AttentionSpec(0.8, softcap=2.0)),
    "window-softcap": (4, 2, 16, 16, AttentionSpec(0.8, window=9, softcap=2.0)),
}


def ragged_lengths(rng: random.Random, block_size: int, queries: int) -> list[tuple[int, int]]:
    """(length, flushed) of rows: short, long, just flushed, about to be flushed, all in the tail."""
    pairs = [(queries, 0), (2 * block_size - 1 if queries == 1 else 2 * block_size, 0)]
    for blocks in (1, 2, 2, 5, 9):
        flushed = blocks * block_size
        pairs.append((flushed + rng.randrange(queries, 2 * block_size), flushed))
    return pairs


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_decode_equals_the_definition(case: str, queries: int, with_sinks: bool) -> None:
    heads, kv_heads, k_dim, v_dim, spec = CASES[case]
    for block_size in (4, 8):
        rng = np.random.default_rng(block_size)
        memory = Memory(rng, block_size, kv_heads, k_dim, v_dim)
        rows = [
            memory.add(slot, length, flushed, spec.window, length - queries)
            for slot, (length, flushed) in enumerate(ragged_lengths(random.Random(1), block_size, queries))
        ]
        q = rng.standard_normal((len(rows), heads, queries, k_dim), np.float32)
        sinks = rng.standard_normal(heads) if with_sinks else None
        out = ReferenceAttention().decode(
            mx.array(q),
            memory.kv(mx.float32),
            decode_layout(rows),
            spec,
            None if sinks is None else mx.array(sinks.astype(np.float32)),
        )
        for index, row in enumerate(rows):
            expected = by_definition(q[index], row.k, row.v, row.length - queries, spec, sinks)
            np.testing.assert_allclose(np.array(out[index]), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("tiled", [False, True], ids=["", "tiled"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("case", CASES)
def test_prefill_equals_the_definition(case: str, with_sinks: bool, tiled: bool) -> None:
    heads, kv_heads, k_dim, v_dim, spec = CASES[case]
    attention = ReferenceAttention(4 * heads * 60 if tiled else None)  # a few queries to a tile
    block_size = 4
    rng = np.random.default_rng(7)
    for flushed, start, length in ((0, 0, 1), (0, 0, 13), (0, 3, 9), (8, 8, 5), (8, 13, 20), (24, 31, 1)):
        memory = Memory(rng, block_size, kv_heads, k_dim, v_dim)
        row = memory.add(2, start, flushed, spec.window, start)
        k = rng.standard_normal((length, kv_heads, k_dim), np.float32)
        v = rng.standard_normal((length, kv_heads, v_dim), np.float32)
        q = rng.standard_normal((heads, length, k_dim), np.float32)
        sinks = rng.standard_normal(heads) if with_sinks else None
        layout = ChunkLayout(2, mx.array(row.table, mx.int32), row.first, flushed, start, length)
        out = attention.prefill(
            mx.array(q)[None],
            mx.array(k.swapaxes(0, 1))[None],
            mx.array(v.swapaxes(0, 1))[None],
            memory.kv(mx.float32),
            layout,
            spec,
            None if sinks is None else mx.array(sinks.astype(np.float32)),
        )
        expected = by_definition(
            q, np.concatenate([row.k, k]), np.concatenate([row.v, v]), start, spec, sinks
        )
        np.testing.assert_allclose(np.array(out[0]), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("queries", [1, 2])
def test_latent_decode_and_prefill_equal_the_definition(queries: int) -> None:
    attention = ReferenceAttention(4 * 4 * 60 if queries == 1 else None)
    heads, latent, rope, block_size = 4, 16, 8, 4
    rng = np.random.default_rng(3)
    memory = Memory(rng, block_size, 1, latent, rope)
    rows = [
        memory.add(slot, length, flushed, None, 0)
        for slot, (length, flushed) in enumerate(ragged_lengths(random.Random(2), block_size, queries))
    ]
    spec = AttentionSpec(0.2)
    kv = memory.kv(mx.float32)
    q = rng.standard_normal((len(rows), heads, queries, latent + rope), np.float32)
    scaled = mx.array(q[..., latent:] * spec.scale)
    out = attention.decode_latent(
        mx.array(q[..., :latent]), scaled, kv, decode_layout(rows), spec
    )
    for index, row in enumerate(rows):
        keys = np.concatenate([row.k, row.v], axis=2)
        expected = by_definition(q[index], keys, row.k, row.length - queries, spec, None)
        np.testing.assert_allclose(np.array(out[index]), expected, rtol=2e-4, atol=2e-5)
    row, length = rows[4], 7
    fresh = rng.standard_normal((length, 1, latent + rope), np.float32)
    q = rng.standard_normal((heads, length, latent + rope), np.float32)
    layout = ChunkLayout(4, mx.array(row.table, mx.int32), row.first, row.flushed, row.length, length)
    out = attention.prefill_latent(
        mx.array(q[None, ..., :latent]),
        mx.array(q[None, ..., latent:] * spec.scale),
        mx.array(fresh.swapaxes(0, 1)[None, ..., :latent]),
        mx.array(fresh.swapaxes(0, 1)[None, ..., latent:]),
        kv,
        layout,
        spec,
    )
    keys = np.concatenate([np.concatenate([row.k, row.v], axis=2), fresh])
    expected = by_definition(q, keys, keys[..., :latent], row.length, spec, None)
    np.testing.assert_allclose(np.array(out[0]), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["grouped", "window", "softcap"])
def test_half_precision_is_as_close_as_its_rounding(case: str, dtype: mx.Dtype) -> None:
    heads, kv_heads, k_dim, v_dim, spec = CASES[case]
    rng = np.random.default_rng(5)
    memory = Memory(rng, 8, kv_heads, k_dim, v_dim)
    rows = [
        memory.add(slot, length, flushed, spec.window, length - 1)
        for slot, (length, flushed) in enumerate(ragged_lengths(random.Random(4), 8, 1))
    ]
    q = rng.standard_normal((len(rows), heads, 1, k_dim), np.float32)
    out = ReferenceAttention().decode(mx.array(q).astype(dtype), memory.kv(dtype), decode_layout(rows), spec)
    assert out.dtype == dtype
    tolerance = 5e-3 if dtype == mx.float16 else 4e-2
    for index, row in enumerate(rows):
        expected = by_definition(q[index], row.k, row.v, row.length - 1, spec, None)
        np.testing.assert_allclose(np.array(out[index].astype(mx.float32)), expected, atol=tolerance)


def test_results_do_not_depend_on_the_other_rows() -> None:
    heads, kv_heads, k_dim, v_dim, spec = CASES["grouped"]
    rng = np.random.default_rng(9)
    memory = Memory(rng, 4, kv_heads, k_dim, v_dim)
    rows = [
        memory.add(slot, length, flushed, None, length - 1)
        for slot, (length, flushed) in enumerate(ragged_lengths(random.Random(6), 4, 1))
    ]
    q = mx.array(rng.standard_normal((len(rows), heads, 1, k_dim), np.float32))
    kv = memory.kv(mx.float32)
    together = ReferenceAttention().decode(q, kv, decode_layout(rows), spec)
    for index, row in enumerate(rows):
        alone = ReferenceAttention().decode(q[index : index + 1], kv, decode_layout([row]), spec)
        np.testing.assert_allclose(np.array(alone[0]), np.array(together[index]), rtol=1e-6, atol=1e-7)
