"""Does a workload fit a machine, and what would make it fit: the arithmetic behind `mlxbatch plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mlxbatch.capacity.budget import activation_bytes, buffer_cache_bytes
from mlxbatch.capacity.kv_bytes import KVBytes, KVFormat, Workload, kv_bytes
from mlxbatch.capacity.model_shape import ModelShape, Quantization
from mlxbatch.units import format_bytes

MOST_SEQUENCES = 4096
MOST_MACHINES = 16


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One model, one machine, one workload. `usable` is what the engine may use of the machine's memory.

    `weight_quantization` None means 16-bit weights.
    """

    shape: ModelShape
    memory: int
    usable: int
    work: Workload
    fmt: KVFormat
    weight_quantization: Quantization | None = None

    @property
    def weights(self) -> int:
        return self.shape.weight_bytes(self.weight_quantization, self.fmt.dtype_bytes)

    @property
    def kv(self) -> KVBytes:
        return kv_bytes(self.shape, self.work, self.fmt)

    @property
    def activations(self) -> int:
        tokens = self.work.chunk + self.work.sequences
        return activation_bytes(self.shape, tokens, self.work.sequences, self.fmt.dtype_bytes)

    @property
    def buffer_cache(self) -> int:
        return buffer_cache_bytes(self.memory)

    @property
    def total(self) -> int:
        return self.weights + self.kv.total + self.activations + self.buffer_cache

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit; 0 when it does."""
        return max(0, self.total - self.usable)

    def lines(self) -> list[tuple[str, int]]:
        """Every item that takes memory, with its bytes; those that are 0 are left out."""
        kv = self.kv
        items = [
            ("weights", self.weights),
            ("KV payload", kv.payload),
            ("KV scales", kv.scales),
            ("KV tails", kv.tails),
            ("recurrent state", kv.state),
            ("pending chunk", kv.pending),
            ("growth of one array", kv.growth),
            ("reserved zero blocks", kv.zero_blocks),
            ("activations (estimated)", self.activations),
            ("buffer cache", self.buffer_cache),
        ]
        return [item for item in items if item[1]]

    def with_sequences(self, sequences: int) -> MemoryPlan:
        return replace(self, work=replace(self.work, sequences=sequences))

    def with_context(self, context: int) -> MemoryPlan:
        return replace(self, work=replace(self.work, context=context))

    def with_kv_bits(self, bits: int) -> MemoryPlan:
        return replace(self, fmt=replace(self.fmt, bits=bits))

    @property
    def most_sequences(self) -> int:
        """Sequences of this context that fit; 0 when not even one does."""
        return _largest(lambda n: self.with_sequences(n).fits, MOST_SEQUENCES)

    @property
    def most_context(self) -> int:
        """The longest context at this number of sequences, in whole blocks; 0 when none fits."""
        size = self.fmt.block_size
        limit = max(self.shape.max_context, self.work.context) // size
        return size * _largest(lambda n: self.with_context(n * size).fits, limit)

    def ways_out(self) -> list[str]:
        """What would make it fit, each with its numbers; empty when it fits."""
        if self.fits:
            return []
        ways: list[str] = []
        context, sequences = self.work.context, self.work.sequences
        fewer = self.most_sequences
        if fewer:
            pool = kv_bytes(self.shape, self.with_sequences(fewer).work, self.fmt).payload
            ways.append(f"fewer sequences: {fewer} of {context:,} tokens fit ({pool:,} bytes of KV)")
        shorter = self.most_context
        if shorter:
            ways.append(f"shorter context: {sequences} sequences of {shorter:,} tokens fit")
        for bits in (8, 4):
            if bits < self.fmt.bits:
                small = self.with_kv_bits(bits)
                kv = small.kv
                verdict = "fits" if small.fits else f"still lacks {format_bytes(small.missing)}"
                ways.append(
                    f"{bits}-bit KV: {kv.payload:,} bytes + {kv.scales:,} of scales + {kv.tails:,} of tails; "
                    f"{verdict}"
                )
        stored = self.weight_quantization.bits if self.weight_quantization else 16
        for bits in (8, 4):
            if bits < stored:
                lighter = replace(self, weight_quantization=Quantization(bits))
                verdict = "fits" if lighter.fits else f"still lacks {format_bytes(lighter.missing)}"
                ways.append(f"{bits}-bit weights: {format_bytes(lighter.weights)}; {verdict}")
        ways.append(self._more_machines())
        return ways

    def _more_machines(self) -> str:
        """Two machines with half the layers each, or as many as it takes."""
        shared, own = self.weights + self.kv.total, self.activations + self.buffer_cache
        room = self.usable - own
        count = max(2, -(-shared // room)) if room > 0 else 0
        if not 2 <= count <= MOST_MACHINES:
            return f"no {MOST_MACHINES} such machines hold it"
        words = (
            "two such machines, half the layers" if count == 2 else f"{count} such machines, an equal share of layers"
        )
        each = -(-shared // count) + own
        return (
            f"{words} on each: {format_bytes(each)} of {format_bytes(self.usable)} each "
            "(mlxbatch itself runs on one machine)"
        )


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest n in [0, limit] that fits, if fitting is monotonic; 0 needs no memory."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
