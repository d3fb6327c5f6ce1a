"""The ratios as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxbatch.bench.compare import Figure
from mlxbatch.errors import UsageError


def plot_ratios(figures: Sequence[Figure], path: Path, model: str) -> None:
    """Write a bar for each ratio; raises UsageError without matplotlib or for an unknown file type."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'mlxbatch[plot]'") from None
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot writes .png or .svg, not {path.suffix or path.name!r}")
    canvas = Canvas(figsize=(8, 0.4 * len(figures) + 1.2), layout="constrained")
    axes = canvas.subplots()
    labels = [f"{figure.workload}: {figure.name}" for figure in figures]
    bars = axes.barh(labels, [figure.ratio for figure in figures], color="#3b6ea5")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="#888888", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel(f"mlxbatch / mlx-lm, {model}; below 1 mlxbatch is faster")
    canvas.savefig(path)
