"""Plots of plans and curves. matplotlib is loaded only when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxbatch.errors import UsageError

if TYPE_CHECKING:
    from mlxbatch.capacity.chips import Chip
    from mlxbatch.capacity.memory_plan import MemoryPlan
    from mlxbatch.capacity.rows_plan import RowsPlan
    from mlxbatch.capacity.saturation import Saturation


def figure(path: Path, columns: int) -> tuple[Any, Sequence[Any]]:
    """A figure with `columns` axes, to be written to a .png, .svg or .pdf. Raises UsageError otherwise."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'mlxbatch[plot]'") from error
    drawn = Figure(figsize=(5.2 * columns, 3.8), layout="constrained")
    axes = drawn.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.grid(True, alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def save(drawn: Any, path: Path) -> None:
    """Write the figure. Raises UsageError when the file cannot be written."""
    try:
        drawn.savefig(path, dpi=144)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def draw_curve(axis: Any, seconds: Mapping[int, float], fit: Saturation, cap: int, label: str) -> None:
    """Throughput gain over rows, with the fit and the cap."""
    rows = sorted(seconds)
    axis.plot(rows, [r * seconds[1] / seconds[r] for r in rows], marker=".", label=label)
    axis.plot(rows, [fit.efficiency(r) for r in rows], "--", label=f"S (1 - exp(-B/S)), S = {fit.s:.1f}")
    axis.axvline(cap, color="grey", linestyle=":", label=f"cap {cap}")
    axis.set_xlabel("rows B")
    axis.set_ylabel("throughput over one row")
    axis.legend(fontsize=8)


def plot_plan(path: Path, plan: MemoryPlan, chip: Chip | None, rows: RowsPlan | None) -> None:
    """Memory by sequences at the planned context, and throughput by rows."""
    drawn, axes = figure(path, 1 if rows is None else 2)
    axis = axes[0]
    most = max(plan.work.sequences, plan.most_sequences, 4)
    counts = sorted({max(1, round(most * 1.25 * i / 24)) for i in range(1, 25)})
    for bits in (16, 8, 4):
        variant = plan.with_kv_bits(bits)
        axis.plot(counts, [variant.with_sequences(n).total / 1e9 for n in counts], label=f"{bits}-bit KV")
    axis.axhline(plan.usable / 1e9, color="red", linestyle="--", label="usable")
    axis.axhline(plan.weights / 1e9, color="grey", linestyle=":", label="weights")
    axis.set_xlabel(f"sequences of {plan.work.context:,} tokens")
    axis.set_ylabel("GB (10^9 bytes)")
    axis.set_title(plan.shape.name, fontsize=10)
    axis.legend(fontsize=8)
    if rows is not None and chip is not None:
        seconds = {line.rows: line.seconds for line in rows.lines}
        draw_curve(axes[1], seconds, rows.saturation, rows.cap.rows, "roofline")
        axes[1].set_title(f"{chip.name}, decode at {plan.work.context:,} tokens", fontsize=10)
    save(drawn, path)
