"""A batch run from its options to its exit code."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich.console import Console

from mlxbatch.batch.formats import LINES_LOOKED_AT, LineReader, check_defaults, detect_format
from mlxbatch.batch.index import InputIndex, index_input
from mlxbatch.batch.interrupt import Interrupt
from mlxbatch.batch.item import BatchFormat, RequestDefaults
from mlxbatch.batch.manifest import FINGERPRINT, Manifest, new_manifest
from mlxbatch.batch.output import Output, OutputOptions, open_output, refuse_differences
from mlxbatch.batch.progress import Reporter
from mlxbatch.batch.report import RunReport
from mlxbatch.batch.runner import BatchRunner, Order, Pending, pending_lines
from mlxbatch.batch.source import InputFile
from mlxbatch.batch.totals import RunTotals
from mlxbatch.config import EngineConfig
from mlxbatch.engine.api import EngineClient
from mlxbatch.errors import EngineError, RequestError, UsageError
from mlxbatch.models.progress import Progress

OK, WITH_ERRORS, INTERRUPTED = 0, 1, 130


class OpenEngine(Protocol):
    """Opens the engine of a run. `progress` is told what is being loaded. Raises UsageError when `trace` asks for
    a write_trace that works, and it would not."""

    def __call__(self, config: EngineConfig, *, progress: Progress, trace: bool) -> EngineClient: ...


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the flags of `mlxbatch run` say. `input` "-" is standard input."""

    input: str
    output: OutputOptions
    config: EngineConfig
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    format: BatchFormat | None = None
    order: Order = "completion"
    limit: int | None = None
    stats: Path | None = None
    trace: Path | None = None
    verbose: bool = False  # tell of every error record

    @property
    def output_name(self) -> str:
        return str(self.output.path) if self.output.path else "standard output"


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """An input file whose every line has been read once."""

    source: InputFile
    reader: LineReader
    index: InputIndex


def check_input(source: InputFile, options: RunOptions, reporter: Reporter) -> CheckedInput:
    """The first pass. Raises UsageError for a file that holds no request, or that --system cannot apply to."""
    try:
        check_defaults(options.defaults)
    except RequestError as error:
        raise UsageError(str(error)) from None
    reporter.phase(f"checking {source.name}")
    chosen = options.format or detect_format(source.head(LINES_LOOKED_AT), source.name)
    reader = LineReader(chosen, options.defaults)
    index = index_input(source, reader)
    if not index.requests:
        raise UsageError(f"{source.name} holds no requests")
    if options.defaults.system is not None and index.completions:
        raise UsageError(
            f"--system is for chats, and {index.completions} lines of {source.name} are plain completions, "
            "which have no system prompt"
        )
    return CheckedInput(source, reader, index)


def tell_problems(checked: CheckedInput, reporter: Reporter) -> None:
    """The first bad lines, and models that lines name but this run does not use."""
    index = checked.index
    for line, error in index.problems:
        reporter.note(f"{checked.source.name}, line {line}: {error}")
    if index.bad:
        more = f" ({index.bad - len(index.problems)} more are not shown)" if index.bad > len(index.problems) else ""
        reporter.note(f"{index.bad} of {index.requests} lines cannot be served and get error records{more}")


def tell_named_models(checked: CheckedInput, model: str, reporter: Reporter) -> None:
    others = [f"{name} ({count})" for name, count in checked.index.named_models.items() if name != model]
    if others:
        reporter.note(f"lines name {', '.join(others)}; {model} answers them")


def manifest_of(checked: CheckedInput, options: RunOptions) -> Manifest:
    """What identifies this run. Only used with an output that can be resumed."""
    return new_manifest(
        input_path=checked.source.path,
        index=checked.index,
        format=checked.reader.format,
        config=options.config,
        defaults=options.defaults,
        output=options.output.path or Path("-"),
        errors=options.output.errors,
        order=options.order,
    )


def run_batch(options: RunOptions, open_engine: OpenEngine, reporter: Reporter, tables: Console | None) -> int:
    """Answer what is pending; returns the exit code. `tables` is where the closing table goes.

    Raises UsageError before anything is written, EngineError when the engine or the output fails later.
    """
    began = time.monotonic()
    with closing(InputFile(options.input)) as source, closing(reporter):
        options.output.check(source.path, (options.stats, options.trace))
        for path in (options.stats, options.trace):
            _check_writable(path)
        checked = check_input(source, options, reporter)
        tell_problems(checked, reporter)
        manifest = manifest_of(checked, options)
        with closing(open_output(options.output, checked.index)) as output:
            if output.manifest is not None:
                refuse_differences(output.manifest, manifest, options.output.path)
            pending = pending_lines(checked.index, output.earlier.done, options.limit)
            if not pending.requests:
                return _nothing_left(options, output, reporter)
            report = _run_pending(options, checked, output, pending, manifest, open_engine, reporter, began)
    if options.stats is not None:
        report.write(options.stats)
    if tables is not None:
        tables.print(report.table())
    totals = report.totals
    if report.interrupted and totals.remaining:
        advice = "go on with --resume" if options.output.resumable else "nothing of it can be resumed"
        reporter.note(f"interrupted with {totals.done} of {totals.requests} requests done; {advice}")
        return INTERRUPTED
    return WITH_ERRORS if totals.error_records else OK


def _run_pending(
    options: RunOptions,
    checked: CheckedInput,
    output: Output,
    pending: Pending,
    manifest: Manifest,
    open_engine: OpenEngine,
    reporter: Reporter,
    began: float,
) -> RunReport:
    checked_at = time.monotonic()
    with ExitStack() as stack:
        engine = None
        if pending.valid:
            engine = stack.enter_context(
                closing(open_engine(options.config, progress=reporter.phase, trace=options.trace is not None))
            )
            if options.trace is not None:
                stack.callback(engine.write_trace, options.trace)
            tell_named_models(checked, engine.model_name, reporter)
            manifest.model[FINGERPRINT] = engine.model_fingerprint
        output.begin(manifest)
        interrupt = stack.enter_context(Interrupt())

        def on_step(totals: RunTotals) -> None:
            if engine is not None:
                reporter.step(totals, engine.stats)
                engine.report_progress(totals.done, totals.requests)

        runner = BatchRunner(
            engine,
            checked.source,
            checked.reader,
            checked.index,
            output,
            order=options.order,
            limit=options.limit,
            rows=options.config.max_num_seqs,
            template_args=options.config.chat_template_args,
            interrupt=interrupt,
            on_step=on_step,
            on_drain=lambda running: reporter.note(
                f"finishing {running} running requests; Ctrl-C again stops at once"
            ),
            on_error=lambda line, message: reporter.note(f"line {line}: {message}") if options.verbose else None,
        )
        loaded = time.monotonic()
        try:
            totals = runner.run()
        except EngineError as error:
            done = runner.totals.done
            advice = "; go on with --resume" if options.output.resumable else ""
            raise EngineError(f"{error}\n{done} of {runner.totals.requests} requests were done{advice}") from error
        seconds = time.monotonic() - loaded
        reporter.close()
        return RunReport(
            model=engine.model_name if engine else options.config.model,
            totals=totals,
            seconds=seconds,
            load_seconds=loaded - checked_at,
            first_token_seconds=None if totals.first_token_at is None else totals.first_token_at - began,
            engine=engine.stats() if engine else {},
            interrupted=interrupt.draining,
        )


def _nothing_left(options: RunOptions, output: Output, reporter: Reporter) -> int:
    earlier = output.earlier
    hint = "; --retry-errors runs those again" if earlier.errors else ""
    reporter.note(
        f"nothing left to do: {options.output_name} holds {earlier.answers} answers and "
        f"{earlier.errors} error records{hint}"
    )
    return WITH_ERRORS if earlier.errors else OK


def _check_writable(path: Path | None) -> None:
    """Before hours of work, not after them."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise UsageError(f"cannot write {path}: it is write-protected")
    if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UsageError(f"cannot write {path}: {path.parent} is not a folder that can be written to")
