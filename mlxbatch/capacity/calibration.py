"""The roofline's efficiency factors, fitted on public figures, and its error on all the others.

    python -m mlxbatch.capacity.calibration

prints every figure beside its prediction. The factors are fitted on M2 Ultra figures alone, one after the
other, each on the figures that it dominates; the constants below are that fit's result, and a test fits
them again.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from mlxbatch.capacity.chips import find_chip
from mlxbatch.capacity.golden_section import minimum
from mlxbatch.capacity.known_models import find_shape
from mlxbatch.capacity.model_shape import Linear, ModelShape, Quantization
from mlxbatch.capacity.roofline import Efficiency, Roofline

FITTED = Efficiency(bandwidth=0.8395, matmul=0.6128, quantized_matmul=0.5605, vector=0.5449, layer_overhead=72.05e-6)


@dataclass(frozen=True, slots=True)
class Figure:
    """One published measurement; see public_figures.toml."""

    id: str
    what: str
    kind: str
    chip: str
    rows: int
    value: float
    unit: str
    source: str
    model: str = ""
    bits: int = 16
    group_size: int = 64
    context: float = 0.0
    k: int = 0
    n: int = 0
    limit: int | None = None
    ratio_to: str = ""
    fit: bool = False


@cache
def public_figures() -> tuple[Figure, ...]:
    text = resources.files("mlxbatch.capacity").joinpath("public_figures.toml").read_text("utf-8")
    return tuple(Figure(**entry) for entry in tomllib.loads(text)["figure"])


@cache
def _shape(model: str) -> ModelShape:
    return find_shape(model)


def _seconds(figure: Figure, efficiency: Efficiency) -> float:
    quantization = Quantization(figure.bits, figure.group_size) if figure.bits < 16 else None
    if figure.kind == "matmul":
        shape = ModelShape("one matrix", "", figure.k, 0, True, (), 0, 0)
    else:
        shape = _shape(figure.model)
    roof = Roofline(shape, find_chip(figure.chip), efficiency, quantization=quantization, limit=figure.limit)
    if figure.kind == "matmul":
        return roof.linear_seconds(Linear(figure.k, figure.n), figure.rows)
    if figure.kind == "prefill":
        return roof.seconds(0, figure.rows)
    return roof.seconds(figure.rows, 0, figure.context)


def predict(figure: Figure, efficiency: Efficiency = FITTED) -> float:
    """The model's value of a figure, in the figure's own unit."""
    seconds = _seconds(figure, efficiency)
    if figure.unit == "ms":
        return seconds * 1e3
    if figure.unit == "tok/s":
        return figure.rows / seconds
    base = next(f for f in public_figures() if f.id == figure.ratio_to)
    if figure.kind == "decode":  # a ratio of throughputs
        return (figure.rows / seconds) / (base.rows / _seconds(base, efficiency))
    return seconds / _seconds(base, efficiency)


def _loss(ids: Sequence[str], efficiency: Efficiency) -> float:
    figures = [f for f in public_figures() if f.id in ids]
    return sum(math.log(predict(f, efficiency) / f.value) ** 2 for f in figures)


def fit() -> Efficiency:
    """The factors that the M2 Ultra's figures give."""
    result = Efficiency(0.84, 0.6, 0.55, 0.5, 0.0)
    decode = ("m2u-70b", "m2u-32b")

    def with_bandwidth(bandwidth: float) -> Efficiency:
        overhead = minimum(lambda o: _loss(decode, replace(result, bandwidth=bandwidth, layer_overhead=o)), 0.0, 1e-3)
        return replace(result, bandwidth=bandwidth, layer_overhead=overhead)

    result = with_bandwidth(minimum(lambda b: _loss(decode, with_bandwidth(b)), 0.5, 1.0))
    result = replace(
        result, matmul=minimum(lambda x: _loss(("m2u-7b-f16-prefill",), replace(result, matmul=x)), 0.1, 1.0)
    )
    tiled = ("m2u-7b-q8-prefill", "m2u-7b-q4-prefill", "m2u-mistral-qmm-8")
    result = replace(
        result,
        quantized_matmul=minimum(lambda x: _loss(tiled, replace(result, quantized_matmul=x)), 0.1, 1.0),
    )
    per_row = ("m2u-mistral-6", "m2u-mistral-8", "m2u-mistral-10")
    return replace(result, vector=minimum(lambda x: _loss(per_row, replace(result, vector=x)), 0.05, 1.0))


def main() -> None:
    factors = fit()
    print(
        f"bandwidth {factors.bandwidth:.4f}  matmul {factors.matmul:.4f}  "
        f"quantised matmul {factors.quantized_matmul:.4f}  vector {factors.vector:.4f}  "
        f"layer overhead {1e6 * factors.layer_overhead:.2f} us"
    )
    print(f"{'figure':72} {'published':>10} {'predicted':>10} {'error':>8}")
    for figure in public_figures():
        value = predict(figure, factors)
        mark = "fitted" if figure.fit else ""
        print(
            f"{figure.what:72} {figure.value:10.3f} {value:10.3f} {100 * (value / figure.value - 1):+7.1f}%"
            f" {figure.unit:5} {mark}"
        )


if __name__ == "__main__":
    main()
