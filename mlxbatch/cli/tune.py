"""`mlxbatch tune`: measure this machine and model, and choose how many rows to run."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mlxbatch.errors import UsageError
from mlxbatch.settings import add_engine_flags, engine_config
from mlxbatch.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from mlxbatch.capacity.measured_curve import MeasuredCurve
    from mlxbatch.capacity.model_shape import Experts
    from mlxbatch.capacity.saturation import Cap, Saturation
    from mlxbatch.config import EngineConfig

CHUNK = 512  # tokens of the largest measured chunk
BUSY = 1.2  # median over fastest of equal steps, from which the measurement is not to be trusted


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("tune", help="measure this machine and model, and choose how many rows to run")
    add_engine_flags(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument("--rows", type=int, default=64, metavar="N", help="most rows to measure (default 64)")
    group.add_argument("--time", default="100s", metavar="TIME", help="time for measuring (default 100s)")
    group.add_argument("--no-save", action="store_true", help="only show the curve")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--plot", metavar="FILE", type=Path, help="draw the curve to FILE.png or .svg")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.rows <= 256:
        raise UsageError("--rows must be 1 to 256")
    config = engine_config(args)
    curve, experts = _measure(args, config, parse_seconds(args.time))

    from mlxbatch.capacity.curve_store import CurveStore
    from mlxbatch.capacity.saturation import choose_cap, fit_saturation

    seconds = curve.seconds_by_rows()
    fit, cap = fit_saturation(seconds), choose_cap(seconds, tpot_target=config.tpot_target)
    saved = None if args.no_save else CurveStore().save(curve)
    if args.plot:
        _plot(args.plot, curve, fit, cap.rows)
    if args.json:
        print(json.dumps(_as_json(curve, fit, cap, saved), indent=2))
    else:
        _print(curve, fit, cap, experts, saved)
    return 0


def _measure(args: argparse.Namespace, config: EngineConfig, budget: float) -> tuple[MeasuredCurve, Experts | None]:
    """Load the model into an engine of its own and time its steps. Loads MLX."""
    from mlxbatch.capacity.chips import detect_chip
    from mlxbatch.capacity.measured_curve import MeasuredCurve
    from mlxbatch.capacity.model_families import read_shape
    from mlxbatch.engine.local import LocalEngine
    from mlxbatch.engine.measure import Measurer
    from mlxbatch.engine.tuning import machine_key, model_key
    from mlxbatch.errors import ModelError
    from mlxbatch.models.progress import once

    def progress(text: str) -> None:
        if not args.quiet:
            print(f"\r\033[K{text}" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)
            if not sys.stderr.isatty():
                print(file=sys.stderr)

    chunk = max(CHUNK, args.rows + config.block_size)
    measured = replace(
        config,
        max_num_seqs=args.rows,
        max_num_batched_tokens=chunk,
        prefix_caching=False,
        mode="balanced",
        tpot_target=None,
        ttft_target=None,
    )
    engine = LocalEngine(measured, progress=once(progress), tuned=False)
    try:
        loaded = engine.loaded
        dtype = str(loaded.dtype).removeprefix("mlx.core.")
        chip = detect_chip()
        rows = _rows_that_fit(engine, args.rows)
        began = time.monotonic()
        measurer = Measurer(
            engine.core,
            most_rows=rows,
            max_model_len=min(engine.max_model_len, 4096),
            max_prompt=CHUNK,
            seconds=budget,
            progress=progress,
        )
        measured_points = measurer.run()
        decode, prefill = measured_points.points()
        took = time.monotonic() - began
        progress("")
        experts = None
        with contextlib.suppress(ModelError):
            experts = read_shape(loaded.config, loaded.name).experts
        stats = engine.stats()
        curve = MeasuredCurve(
            model=model_key(loaded.name, loaded.fingerprint, dtype),
            chip=machine_key(chip),
            decode=decode,
            prefill=prefill,
            measured_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            details={
                "name": loaded.name,
                "dtype": dtype,
                "attention": stats["attention"],
                "block_size": config.block_size,
                "seconds": round(took, 1),
                "spread": round(measured_points.spread, 3),
            },
        )
    finally:
        engine.close()
    return curve, experts


def _rows_that_fit(engine: object, rows: int) -> int:
    """As many rows as the KV pool holds at the lengths that are measured."""
    from mlxbatch.engine.local import LocalEngine
    from mlxbatch.engine.measure import SHORT_PROMPT, STEPS

    assert isinstance(engine, LocalEngine)
    scheduler = engine.core.scheduler
    # each row ends with its prompt and, counted down from the most rows, a few steps for each point
    tokens = SHORT_PROMPT + (STEPS + 4) * 32
    alone = scheduler.kv.bytes_alone(tokens)
    return max(1, min(rows, scheduler.kv.budget // max(1, alone)))


def _as_json(curve: MeasuredCurve, fit: Saturation, cap: Cap, saved: Path | None) -> dict[str, object]:
    return {
        "model": curve.model,
        "chip": curve.chip,
        "measured_at": curve.measured_at,
        "details": dict(curve.details),
        "decode": [{"rows": p.rows, "context": p.context, "seconds": p.seconds} for p in curve.decode],
        "prefill": [{"tokens": p.tokens, "start": p.start, "seconds": p.seconds} for p in curve.prefill],
        "S": fit.s,
        "knee": fit.knee,
        "residual": fit.residual,
        "cap": cap.rows,
        "cap_reason": cap.reason,
        "saved": str(saved) if saved else None,
    }


def _print(curve: MeasuredCurve, fit: Saturation, cap: Cap, experts: Experts | None, saved: Path | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{curve.details['name']}[/] {curve.details['dtype']} on {curve.chip}, {curve.measured_at}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("rows", "step = TPOT", "tok/s", "gain", ""):
        table.add_column(heading, justify="right")
    if experts is not None:
        table.add_column("experts touched", justify="right")
    seconds = curve.seconds_by_rows()
    one = seconds[min(seconds)]
    for rows, time_ in sorted(seconds.items()):
        cells = [str(rows), format_seconds(time_), f"{rows / time_:.0f}", f"{rows * one / time_:.2f}"]
        cells.append("cap" if rows == cap.rows else "")
        if experts is not None:
            cells.append(f"{experts.distinct(rows):.1f} of {experts.total}")
        table.add_row(*cells)
    console.print(table)
    for point in curve.prefill:
        behind = f" behind {point.start}" if point.start else ""
        pace = point.tokens / point.seconds
        console.print(f"prefill {point.tokens}{behind}: {format_seconds(point.seconds)}, {pace:.0f} tok/s")
    console.print(f"\nS {fit.s:.2f}, knee {fit.knee:.1f} rows, residual {100 * fit.residual:.1f}%")
    console.print(
        f"[bold]max_num_seqs=auto is now {cap.rows}[/]: {cap.reason}." if saved else f"cap {cap.rows}: {cap.reason}."
    )
    spread = float(str(curve.details["spread"]))
    if spread > BUSY:
        console.print(
            f"[yellow]Equal steps differed by {100 * (spread - 1):.0f}%: the machine was busy. "
            "Measure again when it is idle.[/]"
        )
    if saved:
        console.print(f"saved to {saved}", style="dim")


def _plot(path: Path, curve: MeasuredCurve, fit: Saturation, cap: int) -> None:
    from mlxbatch.capacity.plot import draw_curve, figure, save

    drawn, axes = figure(path, 2)
    seconds = curve.seconds_by_rows()
    draw_curve(axes[0], seconds, fit, cap, "measured")
    rows = sorted(seconds)
    axes[1].plot(rows, [1e3 * seconds[r] for r in rows], marker=".")
    axes[1].axvline(cap, color="grey", linestyle=":")
    axes[1].set_xlabel("rows")
    axes[1].set_ylabel("ms a step (TPOT)")
    axes[1].set_ylim(bottom=0)
    drawn.suptitle(f"{curve.details['name']} {curve.details['dtype']} on {curve.chip}", fontsize=10)
    save(drawn, path)
