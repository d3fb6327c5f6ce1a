"""`mlxbatch simulate`: the shipped scheduler on a machine that is not here, over loads, policies and row limits."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlxbatch.errors import UsageError
from mlxbatch.units import format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from mlxbatch.simulate.arrivals import SimRequest
    from mlxbatch.simulate.machine import Machine
    from mlxbatch.simulate.study import Point

MOST_JITTER = 2.0  # beyond it a step takes any time at all
BLOCK_SIZE = 16  # tokens, as an engine's blocks have by default

Loads = list[tuple[float | None, "Sequence[SimRequest]"]]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("simulate", help="try policies and loads on a simulated Mac")
    machine = parser.add_argument_group("machine and model")
    machine.add_argument("-m", "--model", required=True, help="known model, config.json or model folder")
    machine.add_argument("--chip", default="m2-ultra", help="chip of the table (default m2-ultra)")
    machine.add_argument("--memory", metavar="SIZE", help="its memory (default: the most it is sold with)")
    machine.add_argument("--weight-bits", type=int, choices=(16, 8, 4), default=4, help="default 4")
    machine.add_argument("--kv-bits", type=int, choices=(16, 8, 4), default=16)
    machine.add_argument("--kv-memory", metavar="SIZE", help="bytes for KV blocks (default: what the memory leaves)")
    machine.add_argument("--jitter", type=float, default=0.0, help="standard deviation of the log of a step's time")
    load = parser.add_argument_group("load")
    load.add_argument("--rate", default="1/s", help="requests per second, several with commas: 0.5/s,1/s,2/s")
    load.add_argument(
        "--arrivals", nargs="+", default=["poisson"], metavar="KIND", help="poisson, or trace FILE (JSONL or CSV)"
    )
    load.add_argument("--requests", type=int, default=1000, metavar="N", help="how many (default 1000)")
    load.add_argument(
        "--prompt-lengths", metavar="LENGTHS", help="512, uniform:A-B, lognormal:MEDIAN,SIGMA or a file"
    )
    load.add_argument("--output-lengths", metavar="LENGTHS", help="likewise (default: both as in chats)")
    load.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="prompt tokens that all share")
    load.add_argument("--interactive", type=float, default=0.0, metavar="SHARE", help="share of interactive requests")
    load.add_argument("--seed", type=int, default=0)
    rules = parser.add_argument_group("scheduling")
    rules.add_argument("--policy", choices=("fcfs", "shortest", "priority"), default="fcfs")
    rules.add_argument("--max-num-seqs", default="auto", metavar="N", help="rows, several with commas, or auto")
    rules.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="default 2048")
    rules.add_argument("--tpot-target", default="100ms", metavar="TIME", help="default 100ms")
    rules.add_argument("--ttft-target", default="2s", metavar="TIME", help="default 2s")
    rules.add_argument("--ignore-targets", action="store_true", help="only report goodput; schedule without targets")
    rules.add_argument("--compare", action="store_true", help="run the baselines too")
    rules.add_argument("--window", default="100ms", metavar="TIME", help="waiting window of dynamic batching")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print one JSON object")
    out.add_argument("--plot", metavar="FILE", type=Path, help="draw the results to FILE.png or .svg")
    out.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from mlxbatch.capacity.chips import find_chip
    from mlxbatch.capacity.rows_plan import auto_rows
    from mlxbatch.engine.metrics import Targets
    from mlxbatch.simulate.study import METHODS, Study, run_study

    _check_ranges(args)
    machine, about = _machine(args)
    targets = Targets(ttft=parse_seconds(args.ttft_target), tpot=parse_seconds(args.tpot_target))
    if args.max_num_seqs == "auto":
        cap = auto_rows(find_chip(args.chip), moe=machine.shape.is_moe, times=machine.times, tpot_target=targets.tpot)
        rows, why = [cap.rows], cap.reason
    else:
        rows, why = _whole_numbers(args.max_num_seqs, "--max-num-seqs", 256), "given"
    loads = _loads(args, machine.max_model_len)
    study = Study(
        machine=machine,
        targets=targets,
        policy=args.policy,
        max_num_batched_tokens=args.max_num_batched_tokens,
        keep_targets=not args.ignore_targets,
        prefix_caching=args.shared_prefix > 0,
        window=parse_seconds(args.window),
        jitter=args.jitter,
        seed=args.seed,
    )
    began = time.monotonic()
    progress = (lambda text: None) if args.quiet else (lambda text: print(f"simulating {text}", file=sys.stderr))
    methods = METHODS if args.compare else ("mlxbatch",)
    points = list(run_study(study, loads, rows, methods, progress=progress))
    took = time.monotonic() - began
    if args.plot:
        from mlxbatch.simulate.plot import plot_study

        plot_study(args.plot, points, targets, f"{machine.shape.name} on {about}")
    if args.json:
        result = {
            "model": machine.shape.name,
            "machine": about,
            "kv_budget": machine.kv_budget,
            "targets": {"ttft": targets.ttft, "tpot": targets.tpot},
            "policy": args.policy,
            "rows_reason": why,
            "runs": [{"rate": p.rate, "rows": p.rows, **p.outcome.as_dict()} for p in points],
        }
        print(json.dumps(result, indent=2))
    else:
        _print(points, machine, about, args, why)
        print(f"simulated in {format_seconds(took)}", file=sys.stderr)
    return 0


def _check_ranges(args: argparse.Namespace) -> None:
    """Raises UsageError for a number that no simulation could mean."""
    if args.requests < 1:
        raise UsageError("--requests must be at least 1")
    if args.shared_prefix < 0:
        raise UsageError("--shared-prefix must be 0 or more")
    if not 0.0 <= args.interactive <= 1.0:
        raise UsageError("--interactive must be from 0 to 1")
    if not 0.0 <= args.jitter <= MOST_JITTER:
        raise UsageError(f"--jitter must be from 0 to {MOST_JITTER:g}")
    rows = 1 if args.max_num_seqs == "auto" else max(_whole_numbers(args.max_num_seqs, "--max-num-seqs", 256))
    if args.max_num_batched_tokens < rows + BLOCK_SIZE:
        raise UsageError(
            f"--max-num-batched-tokens must be at least {rows + BLOCK_SIZE}: a block beside {rows} decoding rows"
        )


def _machine(args: argparse.Namespace) -> tuple[Machine, str]:
    from dataclasses import replace

    from mlxbatch.capacity.budget import MemoryBudget
    from mlxbatch.capacity.calibration import FITTED
    from mlxbatch.capacity.chips import find_chip
    from mlxbatch.capacity.kv_bytes import KVFormat, Workload
    from mlxbatch.capacity.memory_plan import MemoryPlan
    from mlxbatch.capacity.model_shape import Quantization
    from mlxbatch.capacity.roofline import Roofline
    from mlxbatch.cli.model_shape import shape_of
    from mlxbatch.simulate.machine import Machine

    chip = find_chip(args.chip)
    memory = parse_bytes(args.memory) if args.memory else chip.memory[-1]
    shape = shape_of(args.model)
    bits = args.weight_bits
    quantization = None if bits == 16 else Quantization(bits)
    shape = replace(shape, quantization=quantization, name=f"{shape.name} {bits}-bit")
    fmt = KVFormat(bits=args.kv_bits)
    work = Workload(32, 1024, args.max_num_batched_tokens)
    plan = MemoryPlan(shape, memory, int(chip.working_set(memory) * 0.9), work, fmt, quantization)
    budget = MemoryBudget(
        working_set=chip.working_set(memory),
        utilization=0.9,
        weights=plan.weights,
        activations=plan.activations,
        tails=plan.kv.tails,
        pending=plan.kv.pending,
        state=plan.kv.state,
        buffer_cache=plan.buffer_cache,
        layers=len(shape.layers),
    )
    pool = parse_bytes(args.kv_memory) if args.kv_memory else budget.pool
    if pool <= 0:
        raise UsageError(
            f"{shape.name} leaves no room for KV on {chip.name} with this memory; `mlxbatch plan` shows why"
        )
    roof = Roofline(shape, chip, FITTED, as_stored=True, kv_bits=args.kv_bits)
    return Machine(shape, roof, pool, shape.max_context or 8192, fmt), f"{chip.name} {memory >> 30} GiB"


def _loads(args: argparse.Namespace, most: int) -> Loads:
    from mlxbatch.simulate.arrivals import (
        CHAT_OUTPUTS,
        CHAT_PROMPTS,
        parse_lengths,
        parse_rate,
        poisson,
        read_trace,
    )

    kind, *rest = args.arrivals
    if kind == "trace" and len(rest) == 1:
        return [(None, read_trace(Path(rest[0]), most=most))]
    if kind != "poisson" or rest:
        raise UsageError("--arrivals takes poisson, or trace FILE")
    prompts = parse_lengths(args.prompt_lengths or CHAT_PROMPTS)
    outputs = parse_lengths(args.output_lengths or CHAT_OUTPUTS)
    loads: Loads = []
    for text in args.rate.split(","):
        rate = parse_rate(text)
        requests = poisson(
            rate,
            args.requests,
            prompts,
            outputs,
            seed=args.seed,
            most=most,
            interactive_share=args.interactive,
            shared=args.shared_prefix,
        )
        loads.append((rate, requests))
    return loads


def _whole_numbers(text: str, flag: str, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= n <= most for n in numbers):
        raise UsageError(f"{flag} {text!r}: give whole numbers from 1 to {most}, with commas between, or auto")
    return numbers


def _print(points: Sequence[Point], machine: Machine, about: str, args: argparse.Namespace, why: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from mlxbatch.units import format_bytes

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{machine.shape.name}[/] on a simulated {about}, {format_bytes(machine.kv_budget)} of KV")
    console.print(
        f"targets: TTFT {args.ttft_target}, TPOT {args.tpot_target}; policy {args.policy}; rows: {why}", style="dim"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("rate", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for heading in ("rows", "tok/s", "TTFT", "p95", "TPOT", "p95", "goodput", "busy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for before, point in zip([None, *points], points, strict=False):
        if args.compare and before is not None and point.rate != before.rate:
            table.add_section()
        o = point.outcome
        table.add_row(
            "trace" if point.rate is None else f"{point.rate:g}/s",
            o.method,
            str(point.rows),
            f"{o.tokens_per_second:.0f}",
            *(_short(t) for t in (o.ttft.p50, o.ttft.p95, o.tpot.p50, o.tpot.p95)),
            f"{100 * o.goodput:.1f}%",
            f"{100 * o.occupancy * o.busy_share:.0f}%",
        )
    console.print(table)
    console.print(
        "TTFT, TPOT: median and 95th percentile; goodput: requests inside both targets; busy: rows in use",
        style="dim",
    )


def _short(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
