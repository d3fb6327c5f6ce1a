"""`mlxbatch top`: watch a running engine."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from typing import TYPE_CHECKING, Any

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError, UsageError
from mlxbatch.settings import Setting, Sources, add_engine_flags, engine_config, json_object, text

if TYPE_CHECKING:
    from mlxbatch.engine.snapshot import Snapshot
    from mlxbatch.tui.engine_link import EngineLink

DESCRIPTION = """\
Watch a running engine: its batch row by row, the KV blocks, each step, the queue, and what limits it.
Without -m the engine that started last is shown. It starts no engine itself."""

TOP_SETTINGS = (
    Setting("theme", text, "auto (default), mlxbatch-dark, mlxbatch-light, ansi-dark, ansi-light, ...", "NAME"),
)
KEYMAP = Setting("keymap", json_object, "keys by action, in config.toml under [top.keymap]")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--once", action="store_true", help="print one picture as plain text and exit")
    parser.add_argument("--json", action="store_true", help="print the engine's counters as JSON and exit")
    for setting in TOP_SETTINGS:
        setting.add_to(parser)
    add_engine_flags(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks of internal errors")


def run(args: argparse.Namespace) -> int:
    sources = Sources.load()
    chosen = sources.resolve(args, (*TOP_SETTINGS, KEYMAP), "top")
    link = _find_engine(args, sources)
    if args.json:
        return asyncio.run(_print_stats(link))
    if args.once:
        return asyncio.run(_print_once(link))
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("mlxbatch top needs a terminal; --once prints one picture, --json the counters")

    from mlxbatch.tui.keymap import Keymap
    from mlxbatch.tui.terminal_background import terminal_is_light
    from mlxbatch.tui.themes import AUTO, choose_theme
    from mlxbatch.tui.top_app import TopApp

    wanted = chosen.get("theme", AUTO)
    theme = choose_theme(wanted, light=terminal_is_light() if wanted == AUTO else None)
    app = TopApp(link, keymap=Keymap(chosen.get("keymap")), theme=theme)
    app.run()
    return app.return_code or 0


def _find_engine(args: argparse.Namespace, sources: Sources) -> EngineLink:
    """The engine of the model that was named, else the one that started last."""
    from mlxbatch.process.launcher import LaunchOptions
    from mlxbatch.tui.open_engine import Machine, link_factory

    config = engine_config(args, sources)
    if config.model == EngineConfig().model and args.model is None:
        running = Machine().running_models()
        if not running:
            raise EngineError("no engine is running; mlxbatch chat or mlxbatch run starts one")
        model = running[0]
    else:
        model = config.model
    return link_factory(config, LaunchOptions(), kind="top", start_engine=False)(model)


async def _print_stats(link: EngineLink) -> int:
    import json

    try:
        await link.start()
        print(json.dumps(await link.stats(), indent=2))
    finally:
        await link.close()
    return 0


async def _print_once(link: EngineLink) -> int:
    from mlxbatch.tui.engine.frame import engine_frame
    from mlxbatch.tui.engine.view_state import ViewState

    try:
        await link.start()
        snapshot = await _first_snapshot(link)
    finally:
        await link.close()
    size = shutil.get_terminal_size((120, 36))
    for line in engine_frame(snapshot, ViewState(), size.columns, size.lines - 1).lines:
        print(line.text.rstrip())
    return 0


async def _first_snapshot(link: EngineLink) -> Snapshot:
    from mlxbatch.engine.snapshot import Snapshot

    async for event in link.events():
        if isinstance(event, Snapshot):
            return event
    raise EngineError("the engine ended before it said how it stands")
