"""`mlxbatch doctor`: what this machine is, what MLX can use of it, and whether the kernels are right and fast."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlxbatch.units import format_seconds

if TYPE_CHECKING:
    from mlxbatch.execution.attention.metal_report import KernelRow
    from mlxbatch.execution.machine_report import MachineReport


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("doctor", help="check the machine, MLX and the kernels")
    parser.add_argument(
        "--kernels", action="store_true", help="compile, compare and time every kind of Metal kernel"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 if all is well, 1 if a kernel fails (the reference serves in its place)."""
    from mlxbatch.execution.machine_report import machine_report

    machine = machine_report()
    machine.facts["engines"] = _engines_line()
    rows: list[KernelRow] = []
    if args.kernels and machine.has_gpu:
        for row in _kernel_rows():
            rows.append(row)
            if not args.json:
                print(f"\r{len(rows)} kernels ", end="", file=sys.stderr, flush=True)
        print("\r", end="", file=sys.stderr)
    failed = sum(row.problem is not None for row in rows)
    if args.json:
        print(json.dumps(_as_json(machine, rows, args.kernels), indent=2))
    else:
        _print(machine, rows, args.kernels)
    return 1 if failed else 0


def _engines_line() -> str:
    """What engine processes hold of the memory just now."""
    from mlxbatch.process.paths import RuntimeDir
    from mlxbatch.process.registry import Registry

    records = Registry(RuntimeDir.of_user()).live()
    return "\n".join(record.describe(time.time()) for record in records) or "none is running"


def _kernel_rows() -> Iterable[KernelRow]:
    from mlxbatch.execution.attention.metal import MetalAttention
    from mlxbatch.execution.attention.metal_report import report_kernels
    from mlxbatch.execution.attention.reference import ReferenceAttention
    from mlxbatch.execution.matmul_report import report_matmul
    from mlxbatch.execution.quantized_linear import SmallBatchKernel

    yield from report_kernels(MetalAttention(own_prefill=True), ReferenceAttention(), timed=True)
    yield from report_matmul(SmallBatchKernel(), timed=True)


NO_GPU = (
    "The Metal kernels need an Apple GPU; here the reference serves. The project's test suite runs the same kernels "
    "on the CPU, slowly and checked (`make test`)."
)


def _as_json(machine: MachineReport, rows: list[KernelRow], asked: bool) -> dict[str, object]:
    result: dict[str, object] = {
        "machine": machine.facts,
        **machine.numbers,
        "has_gpu": machine.has_gpu,
        "memory_bandwidth": machine.bandwidth,
        "advice": list(machine.advice),
    }
    if asked:
        result["kernels"] = [
            {**asdict(row), "bytes_per_second": row.bytes_per_second, "speedup": row.speedup} for row in rows
        ]
        if not machine.has_gpu:
            result["kernels_note"] = NO_GPU
    return result


def _print(machine: MachineReport, rows: list[KernelRow], asked: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in machine.facts.items():
        facts.add_row(name, value)
    console.print(facts)
    for line in machine.advice:
        console.print(f"\n{line}", highlight=False)
    if not asked:
        return
    if not machine.has_gpu:
        console.print(f"\n{NO_GPU}", highlight=False)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", overflow="fold")
    for column in ("deviation", "time", "GB/s", "of peak", "plain MLX", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, machine.bandwidth))
    console.print(table)
    failed = [row for row in rows if row.problem]
    slower = [row for row in rows if row.speedup is not None and row.speedup < 1]
    console.print(
        f"{len(rows)} kernels: {len(rows) - len(failed)} right, {len(failed)} replaced by plain MLX"
        + (f"; {len(slower)} right but slower than plain MLX, which then serves" if slower else "")
    )
    for row in failed:
        console.print(f"  {row.variant}: {row.problem}", highlight=False)


def _cells(row: KernelRow, bandwidth: float | None) -> list[str]:
    rate = row.bytes_per_second
    return [
        row.variant,
        "-" if row.deviation is None else f"{row.deviation:.0e}",
        "-" if row.seconds is None else format_seconds(row.seconds),
        "-" if rate is None else f"{rate / 1e9:.0f}",
        "-" if rate is None or not bandwidth else f"{rate / bandwidth:.0%}",
        "-" if row.plain_seconds is None else format_seconds(row.plain_seconds),
        "FAILED" if row.problem else "-" if row.speedup is None else f"{row.speedup:.1f}x",
    ]
