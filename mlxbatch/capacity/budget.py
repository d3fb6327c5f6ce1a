"""How many bytes the KV pool may take on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from mlxbatch.capacity.model_shape import ModelShape

LINUX_SHARE = 0.75  # of the memory, where no GPU driver recommends a working set


def buffer_cache_bytes(memory: int) -> int:
    """Bound on the freed buffers that MLX keeps for reuse: a sixteenth of the memory, at most 2 GiB."""
    return min(memory // 16, 2 * 2**30)


def activation_bytes(shape: ModelShape, tokens: int, rows: int, dtype_bytes: int = 2) -> int:
    """A step's activations, estimated: the widest layer's inputs and outputs of `tokens` tokens, three deep
    as a lazy graph holds them, and float32 logits of `rows` rows twice. The engine measures the real peak.
    """
    widest = 0
    for layer in shape.layers:
        width = sum(m.inputs + m.outputs * m.copies for m in layer.linears)
        if layer.experts is not None:
            width += layer.experts.active * sum(m.inputs + m.outputs for m in layer.experts.linears)
        widest = max(widest, width)
    return 3 * tokens * widest * dtype_bytes // 2 + 2 * rows * shape.vocab * 4


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where a machine's bytes go. `others` is what other engines on it hold.

    The pool grows layer by layer, each new layer beside its old self, so a pool of P bytes in L layers needs
    P / L more for a moment: pool = rest x L / (L + 1).
    """

    working_set: int
    utilization: float
    weights: int
    activations: int
    tails: int
    pending: int
    state: int = 0
    buffer_cache: int = 0
    others: int = 0
    layers: int = 1

    @property
    def machine(self) -> int:
        """What all engines may hold together."""
        return int(self.working_set * self.utilization)

    @property
    def usable(self) -> int:
        return self.machine - self.others

    @property
    def fixed(self) -> int:
        """Everything but the pool and its growth."""
        return self.weights + self.activations + self.tails + self.pending + self.state + self.buffer_cache

    @property
    def pool(self) -> int:
        """Bytes for KV blocks; 0 when the rest leaves nothing."""
        return self.pool_within(self.usable)

    def pool_within(self, total: int) -> int:
        """The pool of an engine that takes `total` bytes in all."""
        return max(0, total - self.fixed) * self.layers // (self.layers + 1)

    def with_pool(self, pool: int) -> int:
        """All bytes of an engine with a pool of that size, its growth included."""
        return self.fixed + pool + -(-pool // self.layers)

    @property
    def growth(self) -> int:
        return -(-self.pool // self.layers)

    def lines(self) -> list[tuple[str, int]]:
        """Every item with its bytes, for a table; the pool last."""
        items = [
            ("working set", self.working_set),
            ("usable", self.usable),
            ("weights", self.weights),
            ("activations", self.activations),
            ("tails", self.tails),
            ("pending chunk", self.pending),
            ("recurrent state", self.state),
            ("buffer cache", self.buffer_cache),
            ("growth of one layer", self.growth),
            ("KV pool", self.pool),
        ]
        return [item for item in items if item[1] or item[0] == "KV pool"]
