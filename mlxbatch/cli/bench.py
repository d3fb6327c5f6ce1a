"""`mlxbatch bench`: this engine beside mlx-lm's own batch generation, and the host's share of a step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxbatch.errors import UsageError
from mlxbatch.settings import add_engine_flags, engine_config

if TYPE_CHECKING:
    from mlxbatch.bench.compare import Figure

WORKLOAD_NAMES = ("uniform", "ragged", "shared-prefix", "latency")

DESCRIPTION = """\
compare   the same model, prompts and machine on this engine and on mlx-lm's batch generation, in
          alternation; a ratio below 1 means that mlxbatch is faster
host      Python's time per step, with a null model: planning, commit, detokenising, bookkeeping"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("compare", "host"))
    parser.add_argument(
        "-w",
        "--workload",
        action="append",
        choices=WORKLOAD_NAMES,
        help="only this workload (may be given more than once; default: all)",
    )
    parser.add_argument("-n", "--repeat", type=int, default=3, metavar="N", help="pairs of runs of each (default 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - is standard output")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios (.png or .svg)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.repeat < 1:
        raise UsageError("--repeat must be at least 1")
    if args.what == "host":
        from mlxbatch.bench.host import measure_host

        return _show_host(measure_host(), args.json)
    from rich.console import Console

    from mlxbatch.engine.assembly import load_for
    from mlxbatch.models.progress import once

    errors = Console(stderr=True)
    config = engine_config(args)
    loaded = load_for(config, once(lambda stage: errors.print(stage, style="dim")))
    from mlxbatch.bench.compare import as_json, compare

    with errors.status("measuring") as status:
        figures = compare(loaded, args.workload or WORKLOAD_NAMES, args.repeat, status.update)
    if args.json:
        _write_json(args.json, as_json(figures, {"model": loaded.name, "repetitions": args.repeat}))
    if args.json != "-":
        _print_table(figures, loaded.name, args.repeat)
    if args.plot:
        from mlxbatch.bench.plot import plot_ratios

        plot_ratios(figures, Path(args.plot), loaded.name)
    return 0


def _print_table(figures: list[Figure], model: str, repetitions: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{model}: mlxbatch beside mlx-lm, medians of {repetitions}", title_justify="left")
    for name in ("workload", "figure", "mlxbatch", "mlx-lm", "ratio"):
        table.add_column(name, justify="left" if name in ("workload", "figure") else "right")
    last = ""
    for figure in figures:
        if last and figure.workload != last:
            table.add_section()
        ours, theirs = (f"{_digits(value)} {figure.unit}" for value in (figure.ours, figure.mlx_lm))
        table.add_row(
            figure.workload if figure.workload != last else "", figure.name, ours, theirs, f"{figure.ratio:.2f}"
        )
        last = figure.workload
    Console().print(table)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _show_host(rows: list[dict[str, float]], json_path: str | None) -> int:
    if json_path:
        _write_json(json_path, {"host": rows})
    if json_path != "-":
        for row in rows:
            line = f"{row['rows']:3.0f} rows, context {row['context']:6,.0f}: {row['milliseconds']:.3f} ms a step"
            print(f"{line}, {row['ratio']:.2f} times the first")
    return 0


def _write_json(path: str, values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=2)
    if path == "-":
        print(text)
    else:
        Path(path).write_text(text + "\n", encoding="utf-8")
