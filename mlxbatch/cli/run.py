"""`mlxbatch run`: answer every request of a file, with one model, in one batch."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxbatch.cli.engine import add_process_flags, launch_options
from mlxbatch.config import EngineConfig
from mlxbatch.errors import UsageError
from mlxbatch.request import Priority
from mlxbatch.settings import (
    Setting,
    Sources,
    add_engine_flags,
    engine_config,
    integer,
    number,
    one_of,
    text,
    texts,
)

if TYPE_CHECKING:
    from mlxbatch.batch.progress import Reporter
    from mlxbatch.batch.session import OpenEngine, RunOptions
    from mlxbatch.engine.api import EngineClient
    from mlxbatch.models.progress import Progress
    from mlxbatch.process.launcher import LaunchOptions

DESCRIPTION = """\
Answer every request of a file with one model. Lines are OpenAI Batch requests
(/v1/chat/completions, /v1/completions), {"messages": [...]}, {"prompt": "..."}, or plain text.
The whole file is checked before the model loads. A line that cannot be served becomes an error
record; it never stops the run. Thinking and tool calls of a chat stand apart from its content:
reasoning_content (reasoning in short records) and tool_calls."""

EPILOG = """\
Ctrl-C once finishes the running requests, twice stops at once; --resume goes on from either, and
from a crash. Exit status: 0 all answered, 1 done with error records, 2 wrong usage or input,
3 model or engine failure, 130 interrupted."""

SAMPLING_SETTINGS = (
    Setting("max_tokens", integer, "most new tokens of an answer (default: what fits the context)", "N"),
    Setting("temperature", number, "0 is greedy; OpenAI's default is 1", "T"),
    Setting("top_p", number, "sample from the likeliest tokens that make up this probability", "P"),
    Setting("top_k", integer, "sample from the K likeliest tokens", "K"),
    Setting("min_p", number, "drop tokens below this share of the likeliest one's probability", "P"),
    Setting("seed", integer, "mixed with each custom_id, so that a run repeats and its lines differ", "N"),
    Setting("stop", texts, "text that ends an answer; may be given more than once", "TEXT", repeatable=True),
    Setting("system", text, "system prompt of chats that have none", "TEXT"),
)
RUN_SETTINGS = (
    Setting("format", one_of("openai", "messages", "text"), "openai, messages or text (default: detected)"),
    Setting("order", one_of("completion", "input"), "order of the records: completion (default) or input"),
    Setting("progress", one_of("auto", "bar", "plain", "none"), "auto, bar, plain or none", "STYLE"),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    files = parser.add_argument_group("input and output")
    files.add_argument("-i", "--input", required=True, metavar="FILE", help="requests; - is standard input")
    files.add_argument("-o", "--output", default="-", metavar="FILE", help="records; - (default) is stdout")
    files.add_argument("--errors", metavar="FILE", help="error records (default: among the answers)")
    files.add_argument("--resume", action="store_true", help="go on with an output that an earlier run began")
    files.add_argument("--retry-errors", action="store_true", help="resume, and run failed requests again")
    files.add_argument("--overwrite", action="store_true", help="start anew over an existing output")
    files.add_argument("--limit", type=_positive, metavar="N", help="only the first N requests of the file")
    files.add_argument("--dry-run", action="store_true", help="check the input, say what would run, and stop")
    for setting in RUN_SETTINGS[:2]:
        setting.add_to(files)
    sampling = parser.add_argument_group("parameters of requests that do not name them")
    for setting in SAMPLING_SETTINGS:
        setting.add_to(sampling)
    add_engine_flags(parser)
    process = add_process_flags(parser)
    process.add_argument(
        "--keep-going",
        action="store_true",
        help="should this command be killed, its running requests go on in the engine; --resume takes their answers",
    )
    process.add_argument(
        "--in-process", action="store_true", help="load the model in this process, shared with none; so does --trace"
    )
    reports = parser.add_argument_group("reports")
    reports.add_argument("--stats", metavar="FILE", help="write the figures of the run as JSON")
    reports.add_argument("--trace", metavar="FILE", help="write steps and requests as a Chrome trace")
    RUN_SETTINGS[2].add_to(reports)
    reports.add_argument("-q", "--quiet", action="store_true", help="only errors on standard error")
    reports.add_argument(
        "-v", "--verbose", action="store_true", help="every error, and where in the code a failure was"
    )


def _positive(value: str) -> int:
    try:
        if (parsed := int(value)) > 0:
            return parsed
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {value!r}")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from mlxbatch.batch.dryrun import dry_run
    from mlxbatch.batch.progress import new_reporter
    from mlxbatch.batch.session import run_batch

    sources = Sources.load()
    settings = sources.resolve(args, (*SAMPLING_SETTINGS, *RUN_SETTINGS), "run")
    options = run_options(args, settings, engine_config(args, sources))
    style = settings.get("progress", "auto")
    if style == "auto" and args.output == "-" and sys.stdout.isatty():
        style = "none"  # records scroll over the same terminal: a bar would be torn by every one
    reporter = new_reporter(style, quiet=args.quiet)
    tables = None if args.quiet else Console(stderr=True)
    if args.dry_run:
        return dry_run(options, reporter, tables)
    launch = launch_options(args, sources)
    open_engine = engine_opener(args, reporter, launch)
    if open_engine is not open_local_engine:
        return run_batch(options, open_engine, reporter, tables)
    from mlxbatch.process.awake import Awake

    awake = Awake(allow_sleep=launch.allow_sleep)  # as the engine process does by itself
    awake.set_busy(True)
    try:
        return run_batch(options, open_engine, reporter, tables)
    finally:
        awake.set_busy(False)


def run_options(args: argparse.Namespace, settings: Mapping[str, Any], config: EngineConfig) -> RunOptions:
    from mlxbatch.batch.item import RequestDefaults
    from mlxbatch.batch.output import OutputOptions
    from mlxbatch.batch.session import RunOptions

    return RunOptions(
        input=args.input,
        output=OutputOptions(
            path=None if args.output == "-" else Path(args.output),
            errors=_path(args.errors),
            resume=args.resume,
            overwrite=args.overwrite,
            retry_errors=args.retry_errors,
        ),
        config=config,
        defaults=RequestDefaults(**{s.name: settings[s.name] for s in SAMPLING_SETTINGS if s.name in settings}),
        format=settings.get("format"),
        order=settings.get("order", "completion"),
        limit=args.limit,
        stats=_path(args.stats),
        trace=_path(args.trace),
        verbose=args.verbose,
    )


def engine_opener(args: argparse.Namespace, reporter: Reporter, launch: LaunchOptions) -> OpenEngine:
    """The engine that this run uses: the model's shared process, or one in this process."""
    in_process = args.in_process or args.trace is not None
    if args.keep_going and (in_process or args.output == "-"):
        raise UsageError("--keep-going needs the engine process, and an output file (-o) that a later run resumes")
    if in_process:
        return open_local_engine

    def open_shared_engine(config: EngineConfig, *, progress: Progress, trace: bool) -> EngineClient:
        from mlxbatch.process.client import connect

        if trace:
            raise UsageError("--trace needs an engine in this process (--in-process)")
        name = os.fsencode(Path(args.output if args.output != "-" else args.input).stem).decode(errors="replace")
        return connect(
            config,
            priority=Priority.BATCH,
            kind="run",
            title=f"run:{name}",
            session=f"run {Path(args.output).resolve()}" if args.keep_going else "",
            orphan="continue" if args.keep_going else "cancel",
            options=launch,
            on_status=lambda status: reporter.note(status.text),
            on_loading=lambda message: progress(message.stage, message.done, message.total),
        )

    return open_shared_engine


def open_local_engine(config: EngineConfig, *, progress: Progress, trace: bool) -> EngineClient:
    """The engine in this process. Imports mlx."""
    from mlxbatch.engine.local import LocalEngine

    return LocalEngine(config, progress=progress, trace=trace)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)
