"""Bytes of KV memory, as the engine allocates it.

    one sequence    [ full blocks in the pool, shared or own ............ ][ tail slot ]
    beside the pool tails twice (old and new), a step's pending K and V, one array while the pool grows

The classic formula 2 x layers x kv_heads x head_dim x tokens x bytes x sequences is the pool's payload of a
model whose layers are all full attention with K and V alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxbatch.capacity.model_shape import Attention, ModelShape

SCALE_BYTES = 4  # a scale and a bias of 16 bits for each group of quantised values


def tail_length(block_size: int, q_max: int = 1, steps_in_flight: int = 1) -> int:
    """Positions of a tail slot: the least multiple of block_size that holds a block that is nearly full and
    what the steps in flight add, at least two blocks."""
    needed = block_size - 1 + q_max * (1 + steps_in_flight)
    return max(2 * block_size, -(-needed // block_size) * block_size)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K and V are stored. `bits` below 16 quantises whole blocks: keys per channel within the block,
    values per token (the KIVI scheme), each group with a scale and a bias; tails keep full precision."""

    block_size: int = 16
    dtype_bytes: int = 2
    bits: int = 16

    @property
    def quantized(self) -> bool:
        return self.bits < 16

    def block_payload(self, attention: Attention) -> int:
        """Bytes of the values of one block of one layer."""
        elements = attention.kv_elements * self.block_size
        return elements * self.bits // 8 if self.quantized else elements * self.dtype_bytes

    def block_scales(self, attention: Attention) -> int:
        """Bytes of the scales and biases of one block of one layer."""
        if not self.quantized or not attention.stores_kv:
            return 0
        return (attention.kv_heads * attention.k_dim + attention.kv_heads * self.block_size) * SCALE_BYTES

    def block_bytes(self, attention: Attention) -> int:
        return self.block_payload(attention) + self.block_scales(attention)

    def largest_array(self, attention: Attention) -> int:
        """Bytes of one block in the larger of the two arrays that a layer's pool consists of, scales included."""
        if attention.kind == "latent":  # the compressed vector, and its rotary part
            share = max(attention.v_dim, attention.k_dim - attention.v_dim) / attention.k_dim
        else:
            share = max(attention.k_dim, attention.v_dim) / (attention.k_dim + attention.v_dim)
        return round(self.block_payload(attention) * share) + self.block_scales(attention)


@dataclass(frozen=True, slots=True)
class Workload:
    """What shall fit: `sequences` of `context` tokens each, prefilled at most `chunk` tokens a step."""

    sequences: int
    context: int
    chunk: int = 512

    @property
    def slots(self) -> int:
        """Tail slots: the power of two that holds the sequences, and the scratch slot of padding rows."""
        return (1 << (self.sequences - 1).bit_length()) + 1 if self.sequences else 1


@dataclass(frozen=True, slots=True)
class KVBytes:
    """KV memory by what it is for. `growth` exists only while the pool grows: arrays grow one at a time, each new one
    beside its old self."""

    payload: int
    scales: int
    zero_blocks: int
    tails: int
    pending: int
    growth: int
    state: int

    @property
    def pool(self) -> int:
        return self.payload + self.scales + self.zero_blocks

    @property
    def total(self) -> int:
        return self.pool + self.tails + self.pending + self.growth + self.state


def blocks_per_sequence(attention: Attention, context: int, chunk: int, block_size: int) -> int:
    """Pool blocks that one sequence holds at most in a layer. A window adds its two cut ends and a chunk."""
    full = -(-context // block_size)
    if attention.window is None:
        return full
    return min(full, (attention.window + chunk) // block_size + 2)


def kv_bytes(shape: ModelShape, work: Workload, fmt: KVFormat | None = None) -> KVBytes:
    """KV memory for `work`, every sequence at its full context and nothing shared."""
    fmt = fmt or KVFormat()
    payload = scales = zero_blocks = tails = pending = growth = 0
    for attention in shape.attention_layers():
        if not attention.stores_kv:
            continue
        blocks = work.sequences * blocks_per_sequence(attention, work.context, work.chunk, fmt.block_size)
        token = attention.kv_elements * fmt.dtype_bytes
        payload += blocks * fmt.block_payload(attention)
        scales += blocks * fmt.block_scales(attention)
        zero_blocks += fmt.block_bytes(attention)
        tails += 2 * work.slots * tail_length(fmt.block_size) * token
        pending += work.chunk * token
        growth = max(growth, (blocks + 1) * fmt.largest_array(attention))
    state = 2 * work.slots * shape.state_bytes(fmt.dtype_bytes)
    return KVBytes(payload, scales, zero_blocks, tails, pending, growth, state)
