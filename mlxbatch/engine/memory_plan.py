"""How many bytes of this machine an engine gives to KV blocks."""

from __future__ import annotations

from mlxbatch.capacity.budget import MemoryBudget
from mlxbatch.errors import ModelError
from mlxbatch.units import format_bytes


def kv_budget(budget: MemoryBudget, least: int, requested: int | None) -> int:
    """Bytes for block pools: `requested`, or what the machine leaves. `least` is the smallest pool that can run one
    request at all. Raises ModelError with the arithmetic if the model and that do not fit."""
    if requested is not None:
        if requested < least:
            raise ModelError(
                f"--kv-memory {format_bytes(requested)} is less than one block of each layer takes "
                f"({format_bytes(least)}); give more"
            )
        return requested
    if budget.pool < least:
        items = ", ".join(f"{name} {format_bytes(size)}" for name, size in budget.lines())
        raise ModelError(
            f"the model leaves no room for KV blocks on this machine ({items}). Use a smaller or a more quantised "
            "model, lower max_num_batched_tokens, close other programs, or raise gpu_memory_utilization."
        )
    return budget.pool
