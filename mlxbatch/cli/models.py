"""`mlxbatch models`: list, pull, show and remove models."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from mlxbatch.errors import ModelError, UsageError
from mlxbatch.units import format_bytes


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "models",
        help="list, pull, show and remove models",
        description="A MODEL is a catalog name, a hub repository (OWNER/NAME, or OWNER/NAME:Q4_K_M for one of its "
        "GGUF files), a model directory, or a .gguf file.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the catalog, and what is on this machine")
    listing.add_argument("--json", action="store_true", help="print JSON")
    pull = actions.add_parser("pull", help="fetch a model, or its newest version; one that was cut short goes on")
    show = actions.add_parser("show", help="what a model is, from its files alone")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument("--template", action="store_true", help="print the chat template")
    remove = actions.add_parser("rm", help="delete a fetched model")
    remove.add_argument("-y", "--yes", action="store_true", help="do not ask")
    for action in (pull, show, remove):
        action.add_argument("model", metavar="MODEL")
    for action in (pull, show):
        action.add_argument("--revision", help="branch, tag or commit of a hub repository")


def run(args: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "list": list_models,
        "pull": pull_model,
        "show": show_model,
        "rm": remove_model,
    }
    return actions[args.action](args)


def list_models(args: argparse.Namespace) -> int:
    from mlxbatch.models.inventory import take_inventory

    items = take_inventory()
    if args.json:
        print(json.dumps([item.as_dict() for item in items], indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NAME", "PARAMETERS", "KIND", "MEMORY", "ON DISK", "GOOD FOR"):
        table.add_column(title, overflow="fold")
    for item in items:
        table.add_row(
            item.name,
            item.parameters or "",
            item.architecture or "",
            f"{item.memory_gb} GB" if item.memory_gb else "",
            format_bytes(item.nbytes) if item.nbytes else "-",
            item.purpose or "",
        )
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
    return 0


def pull_model(args: argparse.Namespace) -> int:
    from mlxbatch.models.progress import showing
    from mlxbatch.models.source import resolve

    with showing(sys.stderr) as progress:
        local = resolve(args.model, revision=args.revision, refresh=True, progress=progress)
    print(local.path)
    return 0


def show_model(args: argparse.Namespace) -> int:
    from mlxbatch.models.inventory import find_fetched
    from mlxbatch.models.summary import summarize

    local = find_fetched(args.model, args.revision)
    if local is None:
        raise ModelError(f"{args.model} is not on this machine; fetch it with `mlxbatch models pull {args.model}`")
    summary = summarize(local)
    if args.template:
        if summary.template is None:
            raise ModelError(f"{args.model} has no chat template")
        print(summary.template)
    elif args.json:
        print(json.dumps(summary.as_dict(), indent=2))
    else:
        rows = {
            "name": summary.name,
            "path": summary.path,
            "format": summary.format,
            "model type": summary.model_type,
            "layers": summary.layers,
            "hidden size": summary.hidden_size,
            "heads": f"{summary.heads}, {summary.kv_heads} for keys and values",
            "context": f"{summary.context} tokens",
            "vocabulary": summary.vocabulary,
            "quantization": summary.quantization or "none",
            "weights": format_bytes(summary.weight_bytes),
            "chat template": "yes" if summary.template else "no",
        }
        for name, value in rows.items():
            print(f"{name:<14} {value}")
    return 0


def remove_model(args: argparse.Namespace) -> int:
    from mlxbatch.models.inventory import fetched_bytes, remove_fetched

    nbytes = fetched_bytes(args.model)
    if not nbytes:
        raise ModelError(f"{args.model} is not among the fetched models; `mlxbatch models list` shows them")
    if not args.yes:
        if not sys.stdin.isatty():
            raise UsageError("say -y to delete a model without being asked")
        answer = input(f"Delete {args.model} ({format_bytes(nbytes)})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            return 0
    print(f"freed {format_bytes(remove_fetched(args.model))}")
    return 0
