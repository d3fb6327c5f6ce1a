"""Time of one step from a model's shape and a chip's figures, before anything is measured.

Every kernel takes the longer of reading its bytes and doing its arithmetic. What makes the curve over rows a
staircase on Apple GPUs is which kernel MLX picks for a quantised matmul of M rows (mlx/backend/metal/
quantized.cpp):

    M < limit     generation 13, 14: `qmv` decodes the weights again for every row
                  generation 15 on:  `qmv_wide` decodes them once for up to 5 rows
    M >= limit    `qmm`, in tiles of 32 rows (64 on generation 17): 12 rows cost what 32 do

16-bit matmuls of two rows and more run in tiles of 64. The efficiency factors come from public figures of one
chip (capacity/calibration.py); they are the same for every chip, and so are their errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mlxbatch.capacity.chips import Chip
from mlxbatch.capacity.model_shape import Attention, Experts, Linear, ModelShape, Quantization

VECTORS_PER_TILE = 5  # rows that one qmv_wide threadgroup serves
MATRIX_TILE = 64  # rows of a 16-bit matmul tile
TENSOR_TILE = 16  # rows of a tensor-core tile, for the chips of comparison
GATHER_TILE = 16  # rows of one expert's tile in gather_qmm_rhs
SORTED_PAIRS = 64  # (token, expert) pairs from which mlx-lm sorts them by expert
PAIRS_PER_EXPERT = 4  # and from which MLX then uses the tiled kernel


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What share of a chip's peaks kernels reach, and what a layer costs besides its kernels' work.

    `vector` is the share of the lanes' peak in the per-row quantised kernels, whose operations a weight are
    counted in vector_operations(). `layer_overhead` is in seconds.
    """

    bandwidth: float
    matmul: float
    quantized_matmul: float
    vector: float
    layer_overhead: float


def vector_limit(chip: Chip, inputs: int, outputs: int) -> int:
    """Rows at which MLX leaves the per-row kernels: get_qmv_batch_limit of MLX 0.32."""
    large = 0 if max(inputs, outputs) <= 2048 else 1 if max(inputs, outputs) <= 4096 else 2
    if chip.size == "d":
        return (32, 18, 12)[large]
    return (14, 10, 6)[large] if chip.generation <= 14 else (18, 12, 10)[large]


def vector_operations(chip: Chip, rows: int, bits: int) -> float:
    """Lane operations for each weight, all rows together, in the per-row kernels.

    Up to generation 14 a row masks (below 8 bits), converts and multiply-adds every weight, one instruction
    each. From generation 15 on the integer mask runs beside the float pipeline (Apple, "Explore GPU
    advancements in M3 and A17 Pro"), and qmv_wide converts and scales a weight once for a tile of rows.
    """
    if chip.generation <= 14:
        return rows * (3.0 if bits < 8 else 2.0)
    tiles = -(-rows // VECTORS_PER_TILE)
    return rows + 2.0 * tiles


def _padded(rows: int, tile: int) -> int:
    return -(-rows // tile) * tile


class Roofline:
    """Step times of one model on one chip.

    `quantization` None means as the model is stored, or 16 bits if not `as_stored`. `limit` overrides
    vector_limit(), to compare MLX versions. `kv_bits` is the size of cached keys and values.
    """

    def __init__(
        self,
        shape: ModelShape,
        chip: Chip,
        efficiency: Efficiency,
        *,
        quantization: Quantization | None = None,
        as_stored: bool = True,
        dtype_bytes: int = 2,
        kv_bits: int = 16,
        limit: int | None = None,
    ) -> None:
        self.shape = shape
        self.chip = chip
        self.efficiency = efficiency
        self.quantization = quantization or (shape.quantization if as_stored else None)
        self.dtype_bytes = dtype_bytes
        self.limit = limit
        self._read_rate = chip.bandwidth * efficiency.bandwidth
        self._kv_scale = dtype_bytes if kv_bits >= 16 else kv_bits / 8
        self._linears: Mapping[Linear, int] = Counter(m for layer in shape.layers for m in layer.linears)
        self._experts: Mapping[Experts, int] = Counter(layer.experts for layer in shape.layers if layer.experts)
        self._attention: Mapping[Attention, int] = Counter(shape.attention_layers())
        self._state_bytes = shape.state_bytes(dtype_bytes)
        self._matrix_times: dict[int, float] = {}
        self._head_times: dict[int, float] = {}

    # -- parts ---------------------------------------------------------------------------------------------

    def _weight_bytes(self, weights: int) -> float:
        q = self.quantization
        return weights * (self.dtype_bytes if q is None else q.bits_per_weight / 8)

    def linear_seconds(self, linear: Linear, rows: int) -> float:
        """One matrix times `rows` rows."""
        weights = linear.weights
        read = self._weight_bytes(weights) / self._read_rate
        chip, factor, q = self.chip, self.efficiency, self.quantization
        if not chip.is_apple:
            return max(read, 2.0 * _padded(rows, TENSOR_TILE) * weights / (chip.matmul_flops * factor.matmul))
        if q is None:
            if rows == 1:
                return max(read, weights / (chip.lane_rate * factor.vector))
            return max(read, 2.0 * _padded(rows, MATRIX_TILE) * weights / (chip.matmul_flops * factor.matmul))
        limit = self.limit if self.limit is not None else vector_limit(chip, linear.inputs, linear.outputs)
        if rows < limit:
            return max(read, vector_operations(chip, rows, q.bits) * weights / (chip.lane_rate * factor.vector))
        tile = 64 if chip.generation >= 17 else 32
        return max(read, 2.0 * _padded(rows, tile) * weights / (chip.matmul_flops * factor.quantized_matmul))

    def experts_seconds(self, experts: Experts, rows: int) -> float:
        """The routed experts of one layer: distinct experts are read once, every pair is computed."""
        chip, factor, q = self.chip, self.efficiency, self.quantization
        distinct, pairs = experts.distinct(rows), rows * experts.active
        read = self._weight_bytes(experts.weights_each) * distinct / self._read_rate
        rate = chip.matmul_flops * (factor.matmul if q is None else factor.quantized_matmul)
        tiled = pairs >= SORTED_PAIRS and pairs >= PAIRS_PER_EXPERT * experts.total
        if tiled or not chip.is_apple:
            padded = pairs + GATHER_TILE * distinct / 2  # half a tile at an expert's end, on average
            return max(read, 2.0 * padded * experts.weights_each / rate)
        per_pair = 1.0 if q is None else vector_operations(chip, 1, q.bits)
        return max(read, per_pair * pairs * experts.weights_each / (chip.lane_rate * factor.vector))

    def matrix_seconds(self, rows: int) -> float:
        """All matrices of all layers but the output head, and the layers' overhead."""
        seconds = self._matrix_times.get(rows)
        if seconds is None:
            seconds = sum(self.linear_seconds(m, rows) * n for m, n in self._linears.items())
            seconds += sum(self.experts_seconds(e, rows) * n for e, n in self._experts.items())
            seconds += len(self.shape.layers) * self.efficiency.layer_overhead
            self._matrix_times[rows] = seconds
        return seconds

    def head_seconds(self, rows: int) -> float:
        """The output head, applied to the rows that are sampled."""
        seconds = self._head_times.get(rows)
        if seconds is None:
            seconds = self.linear_seconds(self.shape.embedding, rows) if rows else 0.0
            self._head_times[rows] = seconds
        return seconds

    def decode_attention_seconds(self, context: float) -> float:
        """Attention (and recurrent state) of one decode row that sees `context` cached tokens."""
        rate = self.chip.matmul_flops * self.efficiency.matmul
        seconds = 2.0 * self._state_bytes / self._read_rate
        for attention, count in self._attention.items():
            seen = attention.visible(context)
            elements = attention.kv_heads * (attention.k_dim + attention.v_dim)
            if attention.kind == "latent":
                elements = attention.k_dim
            read = seen * elements * self._kv_scale / self._read_rate
            seconds += count * max(read, seen * attention.flops_per_pair / rate)
        return seconds

    def prefill_attention_seconds(self, tokens: int, seen: float) -> float:
        """Attention of `tokens` tokens of chunks that see `seen` tokens each on average, windows not counted."""
        rate = self.chip.matmul_flops * self.efficiency.matmul
        seconds = 2.0 * self._state_bytes / self._read_rate if tokens else 0.0
        for attention, count in self._attention.items():
            pairs = tokens * attention.visible(seen)
            seconds += count * pairs * attention.flops_per_pair / rate
        return seconds

    # -- a step --------------------------------------------------------------------------------------------

    def seconds(
        self,
        rows: int,
        prefill_tokens: int = 0,
        context: float = 0.0,
        *,
        prefill_context: float | None = None,
        heads: int = -1,
    ) -> float:
        """One step of `rows` decode rows at `context` cached tokens each, beside `prefill_tokens` of chunks.

        `prefill_context` is how many tokens a chunk's token sees on average: start + length / 2 of its chunk (by
        default one chunk from position 0). `heads` is the number of sampled rows; by default the decode rows, and
        one for the chunks.
        """
        tokens = rows + prefill_tokens
        if tokens == 0:
            return 0.0
        sampled = rows + (1 if prefill_tokens else 0) if heads < 0 else heads
        seen = prefill_tokens / 2 if prefill_context is None else prefill_context
        return (
            self.matrix_seconds(tokens)
            + self.head_seconds(sampled)
            + rows * self.decode_attention_seconds(context)
            + self.prefill_attention_seconds(prefill_tokens, seen)
        )
