"""Where a run's records go, and what an earlier run already put there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mlxbatch.batch.index import InputIndex, LineState
from mlxbatch.batch.manifest import Manifest, manifest_path, read_manifest, write_manifest
from mlxbatch.batch.recordlog import RecordLog, RecordSink, RecordStream, whole_lines
from mlxbatch.batch.records import WrittenRecord
from mlxbatch.errors import UsageError

_WRITTEN = msgspec.json.Decoder(WrittenRecord)


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """`path` None is standard output. `errors` None: error records stand among the answers."""

    path: Path | None
    errors: Path | None = None
    resume: bool = False
    overwrite: bool = False
    retry_errors: bool = False

    @property
    def resumable(self) -> bool:
        """Whether the records go to a file that can be read back."""
        return self.path is not None and (self.path.is_file() or not self.path.exists())

    @property
    def goes_on(self) -> bool:
        """Whether there is something to resume."""
        return (self.resume or self.retry_errors) and self.has_records

    @property
    def has_records(self) -> bool:
        return any(_has_content(path) for path in (self.path, self.errors))

    def check(self, input_path: str | None, reports: Iterable[Path | None] = ()) -> None:
        """Raises UsageError when the options contradict each other or the state of the files.

        `reports` are files that the run writes when it ends.
        """
        going_on = self.resume or self.retry_errors
        if going_on and self.overwrite:
            raise UsageError("--overwrite starts anew and --resume goes on: name one of them")
        if going_on and not self.resumable:
            raise UsageError("--resume and --retry-errors need an output file: name it with -o")
        record = manifest_path(self.path) if self.resumable and self.path else None
        named = [_identity(path) for path in (input_path, self.path, record, self.errors, *reports) if path]
        if len(set(named)) < len(named):
            raise UsageError("the input, the output, --errors, --stats and --trace must be different files")
        if self.has_records and self.resumable and not (going_on or self.overwrite):
            path = next(path for path in (self.path, self.errors) if _has_content(path))
            raise UsageError(f"{path} already holds records; --resume goes on with it, --overwrite starts anew")


@dataclass(slots=True)
class EarlierRecords:
    """What the output held when this run began. `done` has a 1 for each line that needs no work."""

    done: bytearray
    answers: int = 0
    errors: int = 0

    @property
    def records(self) -> int:
        return self.answers + self.errors


@dataclass(slots=True)
class Output:
    """The open output. Nothing of an earlier run is touched before `begin`."""

    answers: RecordSink
    errors: RecordSink
    earlier: EarlierRecords
    manifest: Manifest | None = None  # of the run that is resumed
    path: Path | None = None
    retry_errors: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)

    def begin(self, manifest: Manifest) -> None:
        """Make the files ready for the first record of this run.

        Raises UsageError when the run that is resumed was a different one.
        """
        if self.manifest is not None:
            refuse_differences(self.manifest, manifest, self.path)
            for log in self._logs():
                log.cut_torn_line()
                if self.retry_errors:
                    log.keep_only(lambda text: _WRITTEN.decode(text).error is None)
            return
        for log in self._logs():
            log.clear()
        if self.path is not None:
            write_manifest(manifest_path(self.path), manifest)

    def close(self) -> None:
        self._stack.close()

    def _logs(self) -> list[RecordLog]:
        sinks = [self.answers] if self.answers is self.errors else [self.answers, self.errors]
        return [sink for sink in sinks if isinstance(sink, RecordLog)]


def open_output(options: OutputOptions, index: InputIndex) -> Output:
    """Open and lock the files, and read what a resumed run finds in them. Raises UsageError."""
    with ExitStack() as stack:

        def opened(path: Path | None) -> RecordSink:
            if path is None:
                return RecordStream()
            if path.exists() and not path.is_file():  # a device or a pipe
                try:
                    return RecordStream(stack.enter_context(open(path, "wb", buffering=0)), str(path))
                except OSError as error:
                    raise UsageError(f"cannot write to {path}: {error.strerror}") from None
            log = RecordLog(path)
            stack.callback(log.close)
            return log

        answers = opened(options.path)
        errors = answers if options.errors is None else opened(options.errors)
        output = Output(
            answers,
            errors,
            read_earlier(options, index),
            read_manifest(manifest_path(options.path)) if options.path and options.goes_on else None,
            options.path if options.resumable else None,
            options.retry_errors,
        )
        output._stack = stack.pop_all()
        return output


def read_earlier(options: OutputOptions, index: InputIndex) -> EarlierRecords:
    """What the output files hold, of the lines of this input; nothing for a run that starts anew.

    Errors do not count when they are to be retried. Raises UsageError for a record that belongs to no line.
    """
    earlier = EarlierRecords(bytearray(len(index.states)))
    for path in (options.path, options.errors) if options.goes_on else ():
        if path is not None and path.exists():
            _read_records(path, index, earlier, skip_errors=options.retry_errors)
    return earlier


def refuse_differences(earlier: Manifest, now: Manifest, path: Path | None) -> None:
    """Raises UsageError that says what differs."""
    found = earlier.differences(now)
    if found:
        raise UsageError(
            f"{path} was begun as a different run:\n  "
            + "\n  ".join(found)
            + "\nRun it as it was begun, name another -o, or start anew with --overwrite."
        )


def _read_records(path: Path, index: InputIndex, earlier: EarlierRecords, *, skip_errors: bool) -> None:
    for number, text in whole_lines(path):
        where = f"{path}, line {number}"
        try:
            record = _WRITTEN.decode(text)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{where} is not a record of a batch run: {error}") from None
        if record.error is not None and skip_errors:
            continue
        line = record.line_of(index)
        if line is None or index.states[line] == LineState.BLANK:
            raise UsageError(f"{where}: the input has no request {record.custom_id!r}")
        if earlier.done[line]:
            raise UsageError(f"{where}: there is already a record for line {line} of the input")
        earlier.done[line] = 1
        if record.error is not None:
            earlier.errors += 1
        else:
            earlier.answers += 1


def _identity(path: str | Path) -> object:
    """Alike for all names of one file, be they links or not."""
    try:
        status = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def _has_content(path: Path | None) -> bool:
    return path is not None and path.is_file() and path.stat().st_size > 0
