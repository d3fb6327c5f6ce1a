"""`mlxbatch engine`: status, stop, logs and start of the engine processes that chats and runs share."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxbatch.errors import UsageError
from mlxbatch.settings import PROCESS_SETTINGS, Sources, add_engine_flags, engine_config, process_settings
from mlxbatch.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from mlxbatch.process.launcher import LaunchOptions
    from mlxbatch.process.messages import Loading
    from mlxbatch.process.paths import RuntimeDir
    from mlxbatch.process.registry import EngineRecord

DESCRIPTION = """\
The first chat or run of a model starts an engine process, later ones join it, and it stays until it
has been idle for long. MODEL may be left out while only one engine runs."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "engine", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = actions.add_parser("status", help="the engines that run, and what they hold")
    status.add_argument("--json", action="store_true", help="print JSON")
    stop = actions.add_parser("stop", help="stop an engine that nobody uses")
    stop.add_argument("model", nargs="?", metavar="MODEL")
    stop.add_argument("--all", action="store_true", help="every engine")
    stop.add_argument("--force", action="store_true", help="even one in use, or one that does not answer")
    logs = actions.add_parser("logs", help="what an engine wrote, after its end too")
    logs.add_argument("model", nargs="?", metavar="MODEL")
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="the last N lines (default 50)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing as it writes")
    start = actions.add_parser("start", help="start an engine now, or say that it runs")
    add_process_flags(start)
    add_engine_flags(start)


def add_process_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """How an engine process runs, for every command that may start one."""
    group = parser.add_argument_group("engine process")
    for setting in PROCESS_SETTINGS:
        setting.add_to(group)
    return group


def launch_options(args: argparse.Namespace, sources: Sources | None = None) -> LaunchOptions:
    """What add_process_flags(), MLXBATCH_* and config.toml say. Raises UsageError."""
    from mlxbatch.process.launcher import LaunchOptions

    return LaunchOptions(**process_settings(args, sources))


def run(args: argparse.Namespace) -> int:
    actions = {"status": _status, "stop": _stop, "logs": _logs, "start": _start}
    return actions[args.action](args)


def _status(args: argparse.Namespace) -> int:
    from mlxbatch.process.paths import RuntimeDir
    from mlxbatch.process.registry import Registry

    records = Registry(RuntimeDir.of_user()).live()
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(records), indent=2).decode())
    elif not records:
        print("no engine is running")
    else:
        _print_table(records, time.time())
    return 0


def _print_table(records: list[EngineRecord], now: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("MODEL", "STATE", "RESERVES", "CLIENTS", "REQUESTS", "UP", "PROCESS"):
        left = title in ("MODEL", "STATE")
        table.add_column(title, justify="left" if left else "right", overflow="fold", no_wrap=title != "MODEL")
    for record in records:
        table.add_row(
            record.model,
            _state(record, now),
            format_bytes(record.reserved_bytes) if record.ready else "",
            str(record.clients),
            str(record.requests),
            format_seconds(max(0.0, now - record.started)),
            str(record.pid),
        )
    Console().print(table)


def _state(record: EngineRecord, now: float) -> str:
    if not record.ready:
        return "loading"
    idle = record.idle_seconds(now)
    if idle is not None:
        return f"idle {format_seconds(idle)}"
    return "busy" if record.requests else "ready"


def _stop(args: argparse.Namespace) -> int:
    from mlxbatch.process.control import find_engine, stop_engine
    from mlxbatch.process.paths import RuntimeDir
    from mlxbatch.process.registry import Registry

    runtime = RuntimeDir.of_user()
    records = Registry(runtime).live()
    if args.all and args.model:
        raise UsageError("name a model or say --all, not both")
    chosen = records if args.all else [find_engine(records, args.model)]
    for record in chosen:
        stop_engine(record, runtime, force=args.force)
        print(f"stopped {record.model}")
    return 0


def _logs(args: argparse.Namespace) -> int:
    from mlxbatch.process.launcher import log_tail
    from mlxbatch.process.paths import RuntimeDir

    path = _log_of(args.model, RuntimeDir.of_user())
    for line in log_tail(path, max(args.lines, 0)):
        print(line)
    if args.follow:
        _follow(path)
    return 0


def _log_of(model: str | None, runtime: RuntimeDir) -> Path:
    """The log of a running engine, else of the model's last one, else the newest there is."""
    from mlxbatch.config import EngineConfig
    from mlxbatch.process.control import find_engine
    from mlxbatch.process.paths import engine_key
    from mlxbatch.process.registry import Registry

    records = Registry(runtime).live()
    if records and model is None:
        return Path(find_engine(records, None).log)
    if model is not None:
        for record in records:
            if record.model == model or record.key == model:
                return Path(record.log)
        path = runtime.engine(engine_key(EngineConfig(model=model))).log
        if not path.exists():
            raise UsageError(f"there is no log of an engine for {model}")
        return path
    logs = sorted(runtime.logs.glob("engine-*.log"), key=lambda path: path.stat().st_mtime)
    if not logs:
        raise UsageError("no engine has ever run here, so there is no log")
    return logs[-1]


def _follow(path: Path) -> None:
    """Print what is appended, until Ctrl-C. A rotated log is taken up from its start."""
    sys.stdout.flush()
    with path.open("rb") as file:
        file.seek(0, 2)
        while True:
            data = file.read()
            if data:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            elif path.exists() and path.stat().st_size < file.tell():
                file.seek(0)
            else:
                time.sleep(0.25)


def _start(args: argparse.Namespace) -> int:
    from mlxbatch.process.launcher import Launcher
    from mlxbatch.process.link import hello

    sources = Sources.load()
    launcher = Launcher(engine_config(args, sources), options=launch_options(args, sources))
    shown: list[str] = []

    def on_loading(message: Loading) -> None:
        if shown[-1:] != [message.stage]:
            shown.append(message.stage)
            print(message.stage, file=sys.stderr)

    link = launcher.connect(hello("control"), on_loading)
    link.close()
    verb = "started" if launcher.started else "already runs:"
    print(f"{verb} {link.welcome.model}, process {link.welcome.engine_pid}, log {launcher.paths.log}")
    return 0
