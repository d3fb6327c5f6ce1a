"""Every (flushed, start, end) of a chunk: no live position is ever overwritten or missed.

Keys are (sequence, position) numbers, so that every place can be checked after a step and its flush.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import mlx.core as mx  # noqa: E402

from mlxbatch.execution.kv import KVMemory, tail_length  # noqa: E402
from mlxbatch.execution.kv_layer import LayerShape  # noqa: E402
from mlxbatch.execution.step_inputs import StepInputs  # noqa: E402
from mlxbatch.scheduling.plan import (  # noqa: E402
    BlockTable,
    ChunkRow,
    DecodeRow,
    Flush,
    GroupSpec,
    KVView,
    TailBlock,
)

SHAPE = LayerShape(2, 1, 1, mx.float32, mx.float32)
GROUP = GroupSpec("full", (0,), None, 0)
GARBAGE = -7.0


def key_of(sequence: int, positions: np.ndarray, head: int) -> np.ndarray:
    return sequence * 1000.0 + positions + head * 0.25


class Checker:
    """One layer's memory with tails set by hand; runs one step of chunks and decode rows, then its flush."""

    def __init__(self, block_size: int, cases: list[tuple[int, int, int]], decode: list[bool]) -> None:
        self.block_size = block_size
        self.tail_len = tail_length(block_size)
        self.cases = cases  # (flushed, start, end) of the sequence in slot i
        self.decode = decode
        self.memory = KVMemory([SHAPE], [GROUP], block_size, self.tail_len)
        self.layer = self.memory.layers[0]
        self.memory.resize_tails(len(cases))
        tails = np.full((len(cases) + 1, 2, self.tail_len, 1), GARBAGE, np.float32)
        for slot, (flushed, start, _) in enumerate(cases):
            held = np.arange(flushed, start)
            for head in range(2):
                tails[slot, head, held % self.tail_len, 0] = key_of(slot, held, head)
        self.layer._tail = (mx.array(tails), mx.array(-tails))

    def run(self) -> None:
        size = self.block_size
        next_block = 1
        chunks, rows, fresh, blocks = [], [], [], {}
        for slot, (flushed, start, end) in enumerate(self.cases):
            view = KVView(flushed, (BlockTable(flushed // size, np.zeros(0, np.int32)),))
            if self.decode[slot]:
                rows.append(DecodeRow(slot, slot, start, 1, -1, view))
                continue
            count = max(0, end // size - flushed // size)
            ids = tuple(range(next_block, next_block + count))
            next_block += count
            blocks[slot] = ids
            chunks.append(ChunkRow(slot, slot, start, (1,) * (end - start), view, (ids,)))
        for slot, position in [(row.slot, row.position) for row in rows]:
            fresh.append([key_of(slot, np.array(position), head) for head in range(2)])
        for chunk in chunks:
            span = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
            fresh += np.stack([key_of(chunk.slot, span, head) for head in range(2)], axis=1).tolist()
        inputs = StepInputs(1, size, self.tail_len).flat(rows, chunks, None)
        if inputs.write is not None:  # two writes to one place have no order on a GPU
            places = list(zip(inputs.write.places.slots, inputs.write.places.ring, strict=True))
            assert len(set(places)) == len(places)
        keys = mx.array(np.array(fresh, np.float32)[:, :, None])
        self.layer.write(keys, -keys, inputs.write, inputs.pending[0])
        mx.eval(self.memory.step_arrays())
        tail_blocks = []
        for row in rows:
            if row.position + 1 - row.view.flushed >= size:
                tail_blocks.append(TailBlock(row.slot, row.view.flushed, (next_block,)))
                blocks[row.slot] = (next_block,)
                next_block += 1
        self.memory.flush(Flush((next_block,), True, (), tuple(tail_blocks)))
        self._check(blocks)

    def _check(self, blocks: dict[int, tuple[int, ...]]) -> None:
        size = self.block_size
        pool_k, pool_v = (np.array(array) for array in self.layer.pool_arrays)
        tail_k, tail_v = np.array(self.layer.kv.tail_k), np.array(self.layer.kv.tail_v)
        assert not pool_k[0].any() and not pool_v[0].any(), "the zero block was written"
        for slot, (flushed, start, end) in enumerate(self.cases):
            end = start + 1 if self.decode[slot] else end
            ids = blocks.get(slot, ())
            now_flushed = flushed + len(ids) * size
            for head in range(2):
                expected = key_of(slot, np.arange(flushed, end), head)
                pooled = [pool_k[i, head, :, 0] for i in ids]
                ring = np.arange(now_flushed, end) % self.tail_len
                found = np.concatenate([*pooled, tail_k[slot, head, ring, 0]])
                np.testing.assert_array_equal(found, expected, f"K of {(flushed, start, end)}")
                pooled = [pool_v[i, head, :, 0] for i in ids]
                found = np.concatenate([*pooled, tail_v[slot, head, ring, 0]])
                np.testing.assert_array_equal(found, -expected, f"V of {(flushed, start, end)}")


@pytest.mark.parametrize("block_size", [4, 8, 16, 32])
def test_every_chunk_keeps_every_live_position(block_size: int) -> None:
    """All of them: `flushed` matters modulo the tail, `start` reaches to a full tail, `end` three blocks on.

    A chunk that reaches beyond the next block boundary differs from the one a block longer only in whole
    blocks, so the largest sizes take every length around the boundaries.
    """
    tail_len = tail_length(block_size)
    cases = []
    for blocks, held in itertools.product(range(tail_len // block_size), range(tail_len + 1)):
        flushed = blocks * block_size
        start = flushed + held
        for length in range(1, 3 * block_size + 2):
            near_boundary = (start + length + 1) % block_size <= 2
            if block_size <= 8 or length <= 2 or near_boundary:
                cases.append((flushed, start, start + length))
    for first in range(0, len(cases), 256):
        batch = cases[first : first + 256]
        Checker(block_size, batch, [False] * len(batch)).run()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_chunks_and_decode_rows_side_by_side(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([4, 8, 16, 32]))
    tail_len = tail_length(block_size)
    cases, decode = [], []
    for _ in range(data.draw(st.integers(1, 12))):
        is_decode = data.draw(st.booleans())
        flushed = data.draw(st.integers(0, 5)) * block_size
        held = data.draw(st.integers(0, tail_len - 1 if is_decode else tail_len))
        length = 1 if is_decode else data.draw(st.integers(1, 4 * block_size))
        cases.append((flushed, flushed + held, flushed + held + length))
        decode.append(is_decode)
    Checker(block_size, cases, decode).run()


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("query_length", [1, 4, 8])
@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_tail_length_is_the_least_that_holds_what_it_must(
    block_size: int, query_length: int, in_flight: int
) -> None:
    length = tail_length(block_size, query_length, in_flight)
    needed = block_size - 1 + query_length * (1 + in_flight)
    assert length % block_size == 0 and length >= max(needed, 2 * block_size)
    assert length - block_size < max(needed, 2 * block_size)
