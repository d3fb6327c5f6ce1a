"""How many rows saturate which machine, as the roofline sees it, against what people expect.

    python -m mlxbatch.capacity.expectations [--context 1024] [--tpot 0.1]

Expected: 16 to 32 rows on an M2 Ultra, 64 to 128 on an A100, fewer for mixtures of experts. The dense models beside
Mixtral have its layers and width, and as many experts merged into one as its total and its active size. Nothing
here is fitted to the expectations: the factors come from calibration.py.

Where they do not hold, the reason is in the kernels that the roofline describes:

- 16 bits on Apple: two rows already pay for a tile of 64, so the cap is 64 or, where that misses the TPOT target, a
  row or two. Between them every row costs the same.
- 4 bits on Apple: rows pay one by one up to the tile of 32, and the second tile costs as much as the first: 32.
- Experts: a few rows touch all of them, and from there on more rows share the same reads, so that throughput rises
  slowly for long. The gain over one row stays far below a dense model's (S says so), and each step takes so much
  longer than one row's that a TPOT target ends it early. So "fewer" is right under a target, not without one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlxbatch.capacity.calibration import FITTED
from mlxbatch.capacity.chips import find_chip
from mlxbatch.capacity.known_models import find_known, find_shape
from mlxbatch.capacity.model_families import read_shape
from mlxbatch.capacity.model_shape import ModelShape, Quantization
from mlxbatch.capacity.roofline import Roofline
from mlxbatch.capacity.rows_plan import plan_rows

CHIPS = ("m2-ultra", "a100")
EXPECTED = {"m2-ultra": (16, 32), "a100": (64, 128)}


@dataclass(frozen=True, slots=True)
class Finding:
    """`cap` within the TPOT target, `free_cap` without one; `gain` of the free cap over one row."""

    chip: str
    model: str
    bits: int
    s: float
    residual: float
    free_cap: int
    cap: int
    reason: str
    one: float
    at_cap: float
    gain: float

    def holds(self, dense_s: float | None) -> bool:
        """Dense: the cap is in the expected range. Experts: S is below `dense_s`, that of the active size."""
        low, high = EXPECTED[self.chip]
        return low <= self.free_cap <= high if dense_s is None else self.s < dense_s


def dense_like_mixtral(experts: int) -> ModelShape:
    """Mixtral's layers with one dense MLP as wide as `experts` of its experts."""
    config = dict(find_known("mixtral-8x7b") or {})
    config |= {"model_type": "mistral", "intermediate_size": experts * int(config["intermediate_size"])}
    shape = read_shape(config, "")
    return replace(shape, name=f"dense {shape.params / 1e9:.0f}B")


def models() -> tuple[ModelShape, ...]:
    return (
        find_shape("llama-3.1-8b"),
        find_shape("mixtral-8x7b"),
        dense_like_mixtral(8),
        dense_like_mixtral(2),
    )


def findings(context: float = 1024.0, tpot_target: float = 0.1) -> Iterator[Finding]:
    for key in CHIPS:
        chip = find_chip(key)
        for shape in models():
            for bits in (16, 4):
                quantization = Quantization(bits) if bits < 16 else None
                roof = Roofline(shape, chip, FITTED, quantization=quantization, as_stored=False)
                free = plan_rows(roof, shape, context)
                bound = plan_rows(roof, shape, context, tpot_target=tpot_target)
                rows = free.cap.rows
                seconds = roof.seconds(rows, 0, context)
                one = roof.seconds(1, 0, context)
                yield Finding(
                    chip=key,
                    model=shape.name,
                    bits=bits,
                    s=free.saturation.s,
                    residual=free.saturation.residual,
                    free_cap=rows,
                    cap=bound.cap.rows,
                    reason=bound.cap.reason,
                    one=one,
                    at_cap=seconds,
                    gain=rows * one / seconds,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=float, default=1024.0, help="cached tokens of each row")
    parser.add_argument("--tpot", type=float, default=0.1, help="target in seconds for the second cap")
    args = parser.parse_args()
    print(f"context {args.context:g} tokens, TPOT target {1e3 * args.tpot:g} ms")
    print(
        f"{'chip':9} {'model':14} {'bits':>4} {'S':>7} {'resid':>6} {'cap':>4} {'TPOT there':>11} {'gain':>6} "
        f"{'expected':>9} {'':5} {'cap in target':>13}  why"
    )
    found = list(findings(args.context, args.tpot))
    active = models()[-1].name
    for f in found:
        low, high = EXPECTED[f.chip]
        expected, dense_s = f"{low}-{high}", None
        if f.model.startswith("mixtral"):
            dense_s = next(d.s for d in found if (d.chip, d.bits, d.model) == (f.chip, f.bits, active))
            expected = f"S < {dense_s:.1f}"
        print(
            f"{f.chip:9} {f.model:14} {f.bits:4} {f.s:7.1f} {100 * f.residual:5.0f}% {f.free_cap:4} "
            f"{1e3 * f.at_cap:8.1f} ms {f.gain:6.1f} {expected:>9} {'holds' if f.holds(dense_s) else 'no':5} "
            f"{f.cap:13}  {f.reason}"
        )


if __name__ == "__main__":
    main()
