"""`mlxbatch plan`: what fits this Mac, or any chip of the table, from a model's config.json alone."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxbatch.errors import UsageError
from mlxbatch.units import format_bytes, format_seconds, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from mlxbatch.capacity.chips import Chip
    from mlxbatch.capacity.memory_plan import MemoryPlan
    from mlxbatch.capacity.rows_plan import RowsPlan

MOST_ROWS = 128  # looked at for the cap


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("plan", help="what fits this Mac: weights, KV per token, rows by context")
    parser.add_argument(
        "-m", "--model", required=True, help="catalog name, known or downloaded repo, folder, config.json or .gguf"
    )
    parser.add_argument("--chip", help="plan for this chip instead of this machine, like m2-ultra or rtx4090")
    parser.add_argument("--memory", metavar="SIZE", help="its memory, like 128GB (10^9) or 128GiB (2^30)")
    parser.add_argument("--seqs", type=int, default=16, metavar="N", help="sequences at a time (default 16)")
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of each (default 4096)")
    parser.add_argument("--kv-bits", type=int, choices=(16, 8, 4), default=16, help="bits of cached K and V")
    parser.add_argument(
        "--weight-bits", type=int, choices=(16, 8, 4), help="bits of the weights (default: as the model says)"
    )
    parser.add_argument("--reserve", metavar="SIZE", help="leave this much of the memory, and use all the rest")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.90, metavar="SHARE", help="of the working set"
    )
    parser.add_argument("--tpot-target", metavar="TIME", help="wanted time per output token, like 50ms")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw throughput and memory to FILE.png or .svg")


def run(args: argparse.Namespace) -> int:
    from mlxbatch.capacity.budget import LINUX_SHARE
    from mlxbatch.capacity.chips import detect_chip, find_chip
    from mlxbatch.capacity.kv_bytes import KVFormat, Workload
    from mlxbatch.capacity.machine_memory import physical_memory
    from mlxbatch.capacity.memory_plan import MemoryPlan
    from mlxbatch.capacity.model_shape import Quantization
    from mlxbatch.cli.model_shape import shape_of

    if args.seqs < 1 or args.context < 1:
        raise UsageError("--seqs and --context must be at least 1")
    if not 0 < args.gpu_memory_utilization <= 1:
        raise UsageError("--gpu-memory-utilization must be above 0 and at most 1")
    shape = shape_of(args.model)
    chip = find_chip(args.chip) if args.chip else detect_chip()
    if args.memory:
        memory = parse_bytes(args.memory)
    elif args.chip and chip is not None:
        memory = chip.memory[-1]
    else:
        memory = physical_memory()
    if args.reserve is not None:
        usable = memory - parse_bytes(args.reserve)
    else:
        working_set = chip.working_set(memory) if chip else int(memory * LINUX_SHARE)
        usable = int(working_set * args.gpu_memory_utilization)
    quantization = shape.quantization
    if args.weight_bits is not None:
        quantization = None if args.weight_bits == 16 else Quantization(args.weight_bits)
    plan = MemoryPlan(
        shape=shape,
        memory=memory,
        usable=usable,
        work=Workload(args.seqs, args.context),
        fmt=KVFormat(bits=args.kv_bits),
        weight_quantization=quantization,
    )
    rows = _rows(plan, chip, args.tpot_target)
    if args.plot:
        from mlxbatch.capacity.plot import plot_plan

        plot_plan(args.plot, plan, chip, rows)
        print(f"mlxbatch: wrote {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps(_as_json(plan, chip, rows), indent=2))
    else:
        _print(plan, chip, rows)
    return 0


def _rows(plan: MemoryPlan, chip: Chip | None, tpot_target: str | None) -> RowsPlan | None:
    from mlxbatch.capacity.calibration import FITTED
    from mlxbatch.capacity.roofline import Roofline
    from mlxbatch.capacity.rows_plan import plan_rows

    if chip is None:
        return None
    roof = Roofline(
        plan.shape, chip, FITTED, quantization=plan.weight_quantization, as_stored=False, kv_bits=plan.fmt.bits
    )
    target = parse_seconds(tpot_target) if tpot_target else None
    fitting = max(1, min(MOST_ROWS, plan.most_sequences))
    rows = plan_rows(roof, plan.shape, plan.work.context, tpot_target=target, most=fitting)
    if plan.most_sequences == 0:
        return replace(rows, cap=replace(rows.cap, reason="not even one sequence fits"))
    if rows.cap.rows == fitting < MOST_ROWS:
        return replace(rows, cap=replace(rows.cap, reason="as many as fit into memory"))
    return rows


def _as_json(plan: MemoryPlan, chip: Chip | None, rows: RowsPlan | None) -> dict[str, object]:
    shape = plan.shape
    q = plan.weight_quantization
    result: dict[str, object] = {
        "model": shape.name,
        "model_type": shape.model_type,
        "approximate": shape.approximate,
        "parameters": shape.params,
        "active_parameters": shape.active_params,
        "weight_bits": q.bits if q else 16,
        "chip": chip.key if chip else None,
        "memory": plan.memory,
        "usable": plan.usable,
        "kv_bits": plan.fmt.bits,
        "kv_bytes_per_token": shape.kv_bytes_per_token(plan.fmt.dtype_bytes),
        "layers": {kind: shape.count(kind) for kind in ("full", "sliding", "latent", "recurrent")},
        "sequences": plan.work.sequences,
        "context": plan.work.context,
        "bytes": dict(plan.lines()),
        "kv": asdict(plan.kv),
        "total": plan.total,
        "fits": plan.fits,
        "missing": plan.missing,
        "most_sequences": plan.most_sequences,
        "most_context": plan.most_context,
        "ways_out": plan.ways_out(),
    }
    if rows is not None and chip is not None:
        result["rows"] = {
            "source": "roofline",
            "context": rows.context,
            "curve": [{**asdict(line), "tokens_per_second": line.tokens_per_second} for line in rows.lines],
            "S": rows.saturation.s,
            "knee": rows.saturation.knee,
            "residual": rows.saturation.residual,
            "cap": rows.cap.rows,
            "cap_reason": rows.cap.reason,
            "default_max_num_seqs": chip.default_rows(moe=shape.is_moe),
        }
    return result


def _print(plan: MemoryPlan, chip: Chip | None, rows: RowsPlan | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    shape, q = plan.shape, plan.weight_quantization
    kinds = [f"{shape.count(k)} {k}" for k in ("full", "sliding", "latent", "recurrent") if shape.count(k)]
    experts = shape.experts
    size = f"{shape.params / 1e9:.2f}B parameters"
    if experts is not None:
        size += f", {shape.active_params / 1e9:.2f}B active ({experts.active} of {experts.total} experts)"
    stored = f"{q.bits}-bit weights" if q else "16-bit weights"
    console.print(f"[bold]{shape.name}[/]  {size}, {stored}; layers: {', '.join(kinds)}")
    if shape.approximate:
        console.print(
            f"[yellow]The family {shape.model_type!r} is not known; its shape was read as if it were llama.[/]"
        )
    machine = chip.name if chip else "this machine"
    console.print(
        f"{machine}, {format_bytes(plan.memory)} ({plan.memory:,} bytes), usable {format_bytes(plan.usable)}"
    )
    if chip and plan.memory not in chip.memory and chip.is_apple:
        sold = min(chip.memory, key=lambda size: abs(size - plan.memory))
        if plan.memory < sold <= plan.memory * 1.1:
            console.print(
                f"(A Mac sold with {sold >> 30} GB has {sold:,} bytes: --memory {sold >> 30}GiB.)", style="dim"
            )
    per_token = shape.kv_bytes_per_token(plan.fmt.dtype_bytes)
    console.print(f"KV: {per_token:,} bytes a token in 16 bits, all layers, windows not counted\n")

    kv_table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    title = f"{plan.work.sequences} sequences of {plan.work.context:,} tokens, {plan.fmt.bits}-bit KV"
    kv_table.add_column(title)
    kv_table.add_column("bytes", justify="right")
    kv_table.add_column("", justify="right")
    for name, count in plan.lines():
        kv_table.add_row(name, f"{count:,}", format_bytes(count))
    kv_table.add_section()
    kv_table.add_row("total", f"{plan.total:,}", format_bytes(plan.total))
    kv_table.add_row("usable", f"{plan.usable:,}", format_bytes(max(0, plan.usable)))
    console.print(kv_table)
    if plan.fits:
        console.print(
            f"[green]Fits.[/] Up to {plan.most_sequences} sequences of {plan.work.context:,} tokens, or "
            f"{plan.work.sequences} of {plan.most_context:,}."
        )
    else:
        console.print(
            f"[red]Does not fit:[/] {format_bytes(plan.missing)} ({plan.missing:,} bytes) too much. Ways out:"
        )
        for way in plan.ways_out():
            console.print(f"  - {way}")
    if rows is None or chip is None:
        console.print("\nNo speed is predicted: the chip is not in the table. --chip m2-ultra plans for another.")
        return

    speed = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("rows", "step = TPOT", "tok/s", "gain"):
        speed.add_column(heading, justify="right")
    if experts is not None:
        speed.add_column("experts touched", justify="right")
    for line in rows.lines:
        cells = [
            f"{line.rows}" + (f" as {line.padded}" if line.padded != line.rows else ""),
            format_seconds(line.seconds),
            f"{line.tokens_per_second:.0f}",
            f"{line.gain:.2f}",
        ]
        if line.experts is not None and experts is not None:
            cells.append(f"{line.experts:.1f} of {experts.total}")
        speed.add_row(*cells)
    console.print()
    console.print(
        f"Decode at {plan.work.context:,} tokens each, predicted from {chip.name}'s figures (not measured):"
    )
    console.print(speed)
    fit = rows.saturation
    console.print(
        f"S {fit.s:.1f}, knee {fit.knee:.0f} rows, residual {100 * fit.residual:.0f}%; cap {rows.cap.rows} rows "
        f"({rows.cap.reason})."
    )
    if chip.is_apple:
        default = chip.default_rows(moe=shape.is_moe)
        console.print(
            f"max_num_seqs=auto starts with {default} there; `mlxbatch tune` on the Mac itself replaces it."
        )
    else:
        console.print(f"{chip.name} is here for comparison: mlxbatch runs on Macs.")
