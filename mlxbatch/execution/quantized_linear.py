"""A kernel of our own for quantised matmuls of 2 to 32 rows, used where this machine measures it faster.

MLX's kernel for few rows reads and dequantises the weights again for every row, up to 12, 18 or 32 rows on GPUs
of generation 14 and before. Ours does so once, whatever the number of rows, and a row's result does not depend
on the others. Which is faster depends on the shape and the machine, so `use_small_batch_kernels` measures at load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxbatch.execution.attention.metal_source import (
    KernelFactory,
    load_kernel_source,
    mlx_kernel_factory,
)
from mlxbatch.execution.attention.metal_work import int_array

logger = logging.getLogger(__name__)

THREADGROUP_MEMORY = 32768
MOST_ROWS = 32
TILE = 8
MEASURED_ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
LAYERS_MEASURED = 8  # in one evaluation, with weights of their own, so that these come from memory
MEASUREMENTS = 3
OUTPUTS_COMPARED = 512
WORTH = 0.97  # of MLX's time: less is not worth another rounding
TOLERANCE = {mx.float32: 1e-4, mx.float16: 5e-3, mx.bfloat16: 4e-2}  # relative to the largest result


@dataclass(frozen=True, slots=True)
class Cut:
    """How a threadgroup's simdgroups share the work: `output_tiles` of 8 outputs times `splits` of the inputs."""

    output_tiles: int
    splits: int

    def fits(self, shape: Shape, rows: int) -> bool:
        """Whether the staged rows and the splits' sums fit a threadgroup's memory."""
        tiles = -(-rows // TILE)
        staged = self.splits * tiles * TILE * 4 * (128 // shape.bits) * shape.dtype.size
        sums = self.splits * self.output_tiles * tiles * 256
        return staged + sums <= THREADGROUP_MEMORY


# Many outputs a threadgroup read x less often; splits keep a GPU busy with matrices of few outputs.
CUTS = (Cut(8, 1), Cut(4, 2), Cut(2, 4))


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides a quantised matmul's speed, besides the rows."""

    outputs: int
    inputs: int
    bits: int
    group_size: int
    dtype: mx.Dtype

    @property
    def name(self) -> str:
        dtype = str(self.dtype).rpartition(".")[2]
        return f"{self.inputs} to {self.outputs}, {self.bits} bit, groups of {self.group_size}, {dtype}"


class SmallBatchKernel:
    """x [.., K] times dequantised weights [N, K] transposed, 2 to 32 rows in all."""

    def __init__(self, kernel_factory: KernelFactory | None = None) -> None:
        source = load_kernel_source("quantized_matmul_small_batch")
        self._kernel = (kernel_factory or mlx_kernel_factory())(
            name=source.name,
            input_names=("x", "weight", "scales", "biases", "dims"),
            output_names=("out",),
            source=source.body,
            header=source.header,
        )
        self._dims: dict[tuple[int, int, int], mx.array] = {}

    def __call__(self, x: mx.array, linear: nn.QuantizedLinear, cut: Cut) -> mx.array:
        shape = shape_of(linear)
        rows = x.size // shape.inputs
        dims = (rows, shape.outputs, shape.inputs)
        if dims not in self._dims:
            self._dims[dims] = int_array(dims)
        threads = 32 * cut.output_tiles * cut.splits
        out = self._kernel(
            inputs=[
                x.astype(shape.dtype),
                linear["weight"],
                linear["scales"],
                linear["biases"],
                self._dims[dims],
            ],
            template=[
                ("T", shape.dtype),
                ("BITS", shape.bits),
                ("GROUP", shape.group_size),
                ("TILES", -(-rows // TILE)),
                ("OUTPUT_TILES", cut.output_tiles),
                ("SPLITS", cut.splits),
            ],
            grid=(threads * -(-shape.outputs // (TILE * cut.output_tiles)), 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(*x.shape[:-1], shape.outputs)],
            output_dtypes=[shape.dtype],
        )[0]
        return out.astype(x.dtype)


class SmallBatchQuantizedLinear(nn.QuantizedLinear):
    """A QuantizedLinear that takes `cuts[rows]` of our kernel for the row counts that have one."""

    def __init__(self, linear: nn.QuantizedLinear, kernel: SmallBatchKernel, cuts: dict[int, Cut]) -> None:
        nn.Module.__init__(self)
        for name, array in linear.items():  # shared, not copied
            self[name] = array
        self.group_size, self.bits, self.mode = linear.group_size, linear.bits, linear.mode
        self._kernel = kernel
        self._cuts = cuts
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.size // x.shape[-1]
        cut = self._cuts.get(rows)
        if cut is None:
            return super().__call__(x)
        out = self._kernel(x, self, cut)
        return out + self["bias"] if "bias" in self else out


def shape_of(linear: nn.QuantizedLinear) -> Shape:
    outputs, words = linear["weight"].shape
    return Shape(outputs, words * 32 // linear.bits, linear.bits, linear.group_size, linear["scales"].dtype)


def _suits(module: nn.Module) -> bool:
    return (
        type(module) is nn.QuantizedLinear
        and module.mode == "affine"
        and module.bits in (4, 8)
        and module.group_size in (32, 64, 128)
        and module["scales"].dtype in TOLERANCE
    )


def time_linears(
    linears: Sequence[nn.QuantizedLinear], rows: int, kernel: SmallBatchKernel, cut: Cut | None
) -> float:
    """Seconds of one matmul with `rows` rows, by MLX if `cut` is None."""
    shape = shape_of(linears[0])
    x = mx.random.normal((rows, shape.inputs)).astype(shape.dtype)

    def run() -> list[mx.array]:
        if cut is None:
            return [linear(x) for linear in linears]
        return [kernel(x, linear, cut) for linear in linears]

    mx.eval(x, run())
    best = float("inf")
    for _ in range(MEASUREMENTS):
        started = time.perf_counter()
        mx.eval(run())
        best = min(best, time.perf_counter() - started)
    return best / len(linears)


Timer = Callable[[Sequence[nn.QuantizedLinear], int, SmallBatchKernel, Cut | None], float]


def use_small_batch_kernels(
    model: nn.Module,
    kernel: SmallBatchKernel | None = None,
    *,
    timer: Timer = time_linears,
    report: Callable[[str], None] = logger.warning,
) -> dict[Shape, dict[int, Cut]]:
    """Replaces the model's QuantizedLinear layers by ones that use our kernel where it is faster than MLX's.

    Every shape is compared with a float32 product first; one that differs or does not run is named to `report`
    and left alone. Returns the row counts, 2 to 32, that use the kernel, by shape. Call it on a GPU only.
    """
    kernel = kernel or SmallBatchKernel()
    by_shape: dict[Shape, list[tuple[str, nn.QuantizedLinear]]] = {}
    for path, module in model.named_modules():
        if _suits(module):
            by_shape.setdefault(shape_of(module), []).append((path, module))
    chosen: dict[Shape, dict[int, Cut]] = {}
    for shape, found in by_shape.items():
        linears = [linear for _, linear in found]
        cuts = [cut for cut in CUTS if _agrees(linears[0], kernel, cut, report)]
        chosen[shape] = dict(_faster_cuts(linears[:LAYERS_MEASURED], kernel, cuts, timer))
        if chosen[shape]:
            replacements = [
                (path, SmallBatchQuantizedLinear(linear, kernel, chosen[shape])) for path, linear in found
            ]
            model.update_modules(_tree(replacements))
            logger.info("%s: own kernel for rows %s", shape.name, sorted(chosen[shape]))
    return chosen


def deviation(linear: nn.QuantizedLinear, kernel: SmallBatchKernel, cut: Cut) -> float:
    """The largest difference from a float32 product of the first outputs, over every number of tiles that fits,
    relative to the largest result; inf for NaN. (MLX's own half-precision product on a CPU is less exact.)"""
    shape = shape_of(linear)
    worst = 0.0
    compared = min(shape.outputs, OUTPUTS_COMPARED)
    scales, biases = (linear[name][:compared].astype(mx.float32) for name in ("scales", "biases"))
    weights = mx.dequantize(linear["weight"][:compared], scales, biases, shape.group_size, shape.bits)
    for rows in (5, TILE + 1, 2 * TILE + 1, MOST_ROWS):
        if not cut.fits(shape, rows):
            continue
        x = mx.random.normal((rows, shape.inputs)).astype(shape.dtype)
        exact = x.astype(mx.float32) @ weights.T
        difference = mx.abs(kernel(x, linear, cut)[:, :compared].astype(mx.float32) - exact)
        off = float(np.array(mx.max(difference) / mx.max(mx.abs(exact))))
        worst = max(worst, off if off == off else float("inf"))
    return worst


def _agrees(
    linear: nn.QuantizedLinear, kernel: SmallBatchKernel, cut: Cut, report: Callable[[str], None]
) -> bool:
    shape = shape_of(linear)
    try:
        off = deviation(linear, kernel, cut)
    except (RuntimeError, ValueError) as problem:  # what MLX raises when Metal refuses a kernel
        first_line = str(problem).strip().partition("\n")[0]
        report(f"the small-batch matmul kernel for {shape.name} does not run ({first_line}); MLX's serves")
        return False
    if off > TOLERANCE[shape.dtype]:
        report(f"the small-batch matmul kernel for {shape.name} is off by {off:.1e}; MLX's serves")
        return False
    return True


def _faster_cuts(
    linears: Sequence[nn.QuantizedLinear], kernel: SmallBatchKernel, cuts: Sequence[Cut], timer: Timer
) -> Iterator[tuple[int, Cut]]:
    """Row counts whose measured neighbour above is faster with one of `cuts`."""
    shape = shape_of(linears[0])
    last = 1
    for rows in MEASURED_ROWS:
        times = {cut: timer(linears, rows, kernel, cut) for cut in cuts if cut.fits(shape, rows)}
        best = min(times, key=lambda cut: times[cut], default=None)
        if best is not None and times[best] < WORTH * timer(linears, rows, kernel, None):
            yield from ((count, best) for count in range(last + 1, rows + 1))
        last = rows


def _tree(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, object]:
    from mlx.utils import tree_unflatten

    return tree_unflatten(list(modules))
