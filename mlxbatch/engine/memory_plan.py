"""How many bytes of this machine an engine gives to KV blocks, and what it claims beside other engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxbatch.capacity.budget import MemoryBudget
from mlxbatch.errors import NoRoomError
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.units import format_bytes

LEAST_TOKENS = 8192  # one conversation of this length fits an engine that has given way


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """What an engine holds of the machine, in bytes: weights, activations, tails and the whole KV budget.

    `reserved` it may come to hold as things stand; an idle engine gives way down to `least`; `full` is what it has
    use for. The three are equal when --kv-memory fixed the pool. `machine` is what all engines may hold together.
    """

    reserved: int
    least: int
    full: int
    machine: int


# Told of a claim, answers with the bytes that other engines hold after idle ones have given way to it.
Neighbours = Callable[[MemoryClaim], int]


@dataclass(frozen=True, slots=True)
class PoolRange:
    """Between which sizes in bytes the KV budget moves as other engines come and go."""

    least: int
    full: int

    def claim(self, budget: MemoryBudget, pool: int) -> MemoryClaim:
        """The claim of an engine whose KV budget is `pool`."""
        return MemoryClaim(
            budget.with_pool(pool), budget.with_pool(self.least), budget.with_pool(self.full), budget.machine
        )

    def within(self, budget: MemoryBudget, reserved: int) -> int:
        """The KV budget of an engine that holds `reserved` bytes in all."""
        return min(self.full, max(self.least, budget.pool_within(reserved)))


def pool_range(
    budget: MemoryBudget, kv: KVMemory, requested: int | None, *, rows: int, max_model_len: int
) -> PoolRange:
    """`requested` is kept whatever comes. `rows` sequences of `max_model_len` tokens are all there is use for."""
    if requested is not None:
        return PoolRange(requested, requested)
    useful = 0
    for blocks, spec in zip(kv.blocks_for(max_model_len), kv.specs, strict=True):
        spare = rows + rows * blocks // 100 + 1  # as admission wants it, and the zero block
        useful += (rows * blocks + spare) * spec.bytes_per_block
    full = min(budget.pool_within(budget.machine), useful)
    return PoolRange(min(full, kv.bytes_alone(min(max_model_len, LEAST_TOKENS))), full)


def kv_budget(budget: MemoryBudget, smallest: int, full: int, *, requested: bool, memory: int) -> int:
    """Bytes for block pools: `full`, or what the machine leaves. `smallest` is the pool that can just run one
    request; `requested`, that the user named `full`; `memory` is all that this machine has. Raises NoRoomError with
    the arithmetic if it does not fit."""
    if requested:
        if full < smallest:
            raise NoRoomError(
                f"--kv-memory {format_bytes(full)} is less than one block of each layer takes "
                f"({format_bytes(smallest)}); give more"
            )
        total = format_bytes(budget.with_pool(full))
        if budget.with_pool(full) > memory:
            raise NoRoomError(
                f"--kv-memory {format_bytes(full)} does not fit this machine: with the model's own it makes {total}, "
                f"and there are {format_bytes(memory)}; give less, or none to let mlxbatch decide"
            )
        if budget.others and budget.with_pool(full) > budget.usable:
            free = format_bytes(max(0, budget.usable))
            raise NoRoomError(
                f"--kv-memory {format_bytes(full)} does not fit beside other engines: with the model's own it makes "
                f"{total}, and {free} are free"
            )
        return full
    if budget.pool < smallest:
        items = ", ".join(f"{name} {format_bytes(size)}" for name, size in budget.lines())
        raise NoRoomError(
            f"the model leaves no room for KV blocks on this machine ({items}). Use a smaller or a more quantised "
            "model, lower max_num_batched_tokens, close other programs, or raise gpu_memory_utilization."
        )
    return min(full, budget.pool)
