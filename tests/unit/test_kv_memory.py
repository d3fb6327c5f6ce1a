"""Bytes, growth, moves and shrinking of the KV pools, and that flushes write in place."""

from __future__ import annotations

import io

import numpy as np
import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import mlx.core as mx  # noqa: E402
import tiny_models  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from mlxbatch.execution.kv import KVMemory  # noqa: E402
from mlxbatch.execution.kv_layer import LayerShape  # noqa: E402
from mlxbatch.execution.model_runner import ModelRunner  # noqa: E402
from mlxbatch.scheduling.plan import BlockMove, Flush, GroupSpec, TailBlock  # noqa: E402

BLOCK = 4
SHAPES = [
    LayerShape(2, 8, 8, mx.float32, mx.float32),
    LayerShape(2, 8, 4, mx.float16, mx.float32),
    LayerShape(1, 16, 16, mx.bfloat16, mx.bfloat16),
]
GROUPS = [
    GroupSpec("full", (0, 2), None, BLOCK * (SHAPES[0].bytes_per_token + SHAPES[2].bytes_per_token)),
    GroupSpec("window-8", (1,), 8, BLOCK * SHAPES[1].bytes_per_token),
]


def make_memory() -> KVMemory:
    return KVMemory(SHAPES, GROUPS, BLOCK, 2 * BLOCK)


def fill_tail(memory: KVMemory, slot: int, value: float) -> None:
    """Positions [0, BLOCK) of a slot's tail become value + layer."""
    for index, layer in enumerate(memory.layers):
        tails = []
        for tail in layer.kv.tail_k, layer.kv.tail_v:
            array = np.array(tail.astype(mx.float32))
            array[slot, :, :BLOCK] = value + index
            tails.append(mx.array(array).astype(tail.dtype))
        layer._tail = tuple(tails)


def block_values(memory: KVMemory, layer: int, block: int) -> set[float]:
    arrays = memory.layers[layer].pool_arrays
    return {float(x) for array in arrays for x in np.array(array.astype(mx.float32))[block].ravel()}


def test_bytes_are_exact() -> None:
    memory = make_memory()
    memory.resize_tails(4)
    memory.flush(Flush((9, 5), False))
    mx.eval(memory.step_arrays())
    pools = [array for layer in memory.layers for array in layer.pool_arrays]
    tails = [array for layer in memory.layers for array in (layer.kv.tail_k, layer.kv.tail_v)]
    assert memory.pool_bytes((9, 5)) == sum(array.nbytes for array in pools)
    assert memory.tail_bytes(4) == sum(array.nbytes for array in tails)
    assert memory.nbytes == sum(array.nbytes for array in pools + tails)
    assert memory.num_blocks == (9, 5)


def test_pending_bytes_are_exact_and_end_with_the_flush() -> None:
    model, _ = tiny_models.build("llama")
    runner = ModelRunner(model, block_size=8)
    driver = StepDriver(runner)
    driver.step(chunks=[(driver.add(list(range(3, 30))), 27)])
    pending = sum(layer.pending_nbytes for layer in runner.kv.layers)
    assert pending == 24 * runner.kv.bytes_per_token
    driver.step(decode=driver.sequences)
    assert sum(layer.pending_nbytes for layer in runner.kv.layers) == 0


def test_growth_keeps_blocks_and_adds_zeros() -> None:
    memory = make_memory()
    memory.resize_tails(1)
    memory.flush(Flush((3, 3), False))
    fill_tail(memory, 0, 5.0)
    memory.flush(Flush((6, 3), False, (), (TailBlock(0, 0, (2, 1)),)))
    assert [block_values(memory, layer, 2) for layer in (0, 2)] == [{5.0}, {7.0}]
    assert block_values(memory, 1, 1) == {6.0}
    memory.flush(Flush((9, 4), False))
    assert memory.num_blocks == (9, 4)
    assert block_values(memory, 0, 2) == {5.0}
    assert block_values(memory, 1, 1) == {6.0}
    for layer, blocks in ((0, 9), (1, 4), (2, 9)):
        assert all(block_values(memory, layer, b) == {0.0} for b in range(blocks) if b not in (1, 2))


def test_moves_come_before_tail_blocks_and_shrinking_comes_last() -> None:
    memory = make_memory()
    memory.resize_tails(2)
    fill_tail(memory, 0, 1.0)
    fill_tail(memory, 1, 10.0)
    memory.flush(Flush((8, 4), False, (), (TailBlock(0, 0, (7, None)),)))
    moves = (BlockMove(0, 7, 2),)
    memory.flush(Flush((4, 4), False, moves, (TailBlock(1, 0, (3, 3)),)))
    assert memory.num_blocks == (4, 4)
    assert block_values(memory, 0, 2) == {1.0}
    assert block_values(memory, 0, 3) == {10.0}
    assert block_values(memory, 1, 3) == {11.0}
    assert block_values(memory, 1, 2) == {0.0}


def test_tails_keep_their_slots_through_resizing_and_copies() -> None:
    memory = make_memory()
    memory.resize_tails(2)
    fill_tail(memory, 1, 3.0)
    memory.resize_tails(8)
    memory.copy_tails([1], [6])
    for index, layer in enumerate(memory.layers):
        tail = np.array(layer.kv.tail_k.astype(mx.float32))
        assert tail.shape[0] == 9
        assert (tail[6, :, :BLOCK] == 3.0 + index).all() and (tail[5] == 0).all()
    memory.resize_tails(2)
    assert (np.array(memory.layers[0].kv.tail_k)[1, :, :BLOCK] == 3.0).all()
    assert memory.num_slots == 2


def test_growth_needs_one_array_more() -> None:
    shape = LayerShape(4, 64, 64, mx.float32, mx.float32)
    group = GroupSpec("full", (0, 1, 2), None, 3 * 16 * shape.bytes_per_token)
    memory = KVMemory([shape] * 3, [group], 16, 32)
    memory.flush(Flush((200,), False))
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    memory.flush(Flush((400,), False))
    array = memory.growth_bytes_per_block * 400
    grown = memory.pool_bytes((400,)) - memory.pool_bytes((200,))
    assert memory.growth_bytes_per_block * 400 == memory.layers[0].pool_arrays[0].nbytes
    assert memory.peak_bytes - before <= grown + array


def lazy_operations(memory: KVMemory) -> int:
    """Operations that would still have to run to give the tails and pending blocks."""
    arrays = [array for layer in memory.layers for array in layer._tail]
    arrays += [array for layer in memory.layers for entry in layer._pending for array in entry]
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("shape=rectangle")


@pytest.mark.parametrize("read", [True, False], ids=["ids-read", "in-flight"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_flush_allocates_no_second_pool(name: str, read: bool) -> None:
    """After a step with a chunk, a fork and a decode row, of which at most the ids were read, nothing is left to
    be computed, and the flush of the next plan writes into the pools that are there."""
    model, _ = tiny_models.build(name)
    runner = ModelRunner(model, block_size=8)
    driver = StepDriver(runner, num_blocks=20_000, num_slots=8)
    first, second = driver.add(list(range(3, 40))), driver.add(list(range(50, 90)))
    driver.step(chunks=[(first, 37)])
    for _ in range(5):
        driver.step(decode=[first])
    fork = driver.add([])
    driver.step(decode=[first], chunks=[(second, 20)])
    driver.step(decode=[first])
    plan = driver.step(decode=[first], chunks=[(second, 20)], forks=[(second, fork)])
    assert plan.flush is None
    assert lazy_operations(runner.kv) == 0
    if read:
        driver.drain()
    smallest = min(array.nbytes for layer in runner.kv.layers for array in layer.pool_arrays)
    in_flight = mx.get_active_memory()
    plan = driver.step(decode=[first, second, fork])  # resets MLX's peak when its flush begins
    assert plan.flush is not None and plan.flush.pending
    assert lazy_operations(runner.kv) == 0
    driver.drain()
    assert mx.get_peak_memory() - in_flight < smallest / 4
    assert runner.kv.flush_overruns == 0


def test_a_flush_that_copies_the_pool_is_counted() -> None:
    memory = make_memory()
    memory.resize_tails(1)
    memory.flush(Flush((30_000, 2), False))
    held = [layer.pool_arrays for layer in memory.layers]
    memory.flush(Flush((30_000, 2), False, (), (TailBlock(0, 0, (1, 1)),)))
    assert memory.flush_overruns == 1
    del held
    memory.flush(Flush((30_000, 2), False, (), (TailBlock(0, 0, (1, 1)),)))
    assert memory.flush_overruns == 1


def test_a_flush_waits_for_readers_in_flight() -> None:
    """One layer and few operations: MLX's CPU backend blocks by itself beyond ten tasks in flight."""
    memory = KVMemory(SHAPES[:1], [GroupSpec("full", (0,), None, BLOCK * SHAPES[0].bytes_per_token)], BLOCK, 8)
    memory.resize_tails(1)
    memory.flush(Flush((60_000,), False))
    matrix = mx.ones((2000, 2000))
    mx.eval(matrix)
    matrix = matrix @ matrix  # the reader waits for it
    reader = memory.layers[0].pool_arrays[0][mx.minimum(matrix[0, 0], 0).astype(mx.int32)]
    mx.async_eval(reader)
    memory.flush(Flush((60_000,), False, (), (TailBlock(0, 0, (1,)),)))
    assert memory.flush_overruns == 0
