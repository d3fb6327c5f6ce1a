"""The output file: append-only, one record a line, whole lines only.

A record is written with one write() and needs no later one, so that `kill -9` loses at most the line being
written. Such a torn last line has no line end; reopening cuts it off and its request runs again.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec

from mlxbatch.errors import EngineError, UsageError

SYNC_SECONDS = 1.0


class RecordSink(Protocol):
    """Where records go."""

    def append(self, record: object) -> None: ...
    def close(self) -> None: ...


class RecordStream:
    """Standard output, a pipe or a device: records are flushed, and cannot be read back."""

    def __init__(self, stream: BinaryIO | None = None, name: str = "standard output") -> None:
        self._stream = stream or sys.stdout.buffer
        self._name = name

    def append(self, record: object) -> None:
        """Raises BrokenPipeError when the reader has gone, EngineError when a write fails otherwise."""
        data = memoryview(msgspec.json.encode(record) + b"\n")
        try:
            while data:
                data = data[self._stream.write(data) :]
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise EngineError(f"cannot write to {self._name}: {error.strerror}") from None

    def close(self) -> None:
        pass


class RecordLog:
    """One file of records that this process alone may write. Opening it changes nothing in it.

    Every record is with the system when `append` returns; it is on the disk at most SYNC_SECONDS of writing
    later, and when the file is closed. Raises UsageError when the file cannot be opened or is being written
    by another run, EngineError when a write fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open_locked(path)
        self._synced = time.monotonic()

    def cut_torn_line(self) -> None:
        """Drop what a killed run wrote of its last record."""
        _cut_torn_line(self._file)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)

    def append(self, record: object) -> None:
        data = memoryview(msgspec.json.encode(record) + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self._sync()
        except OSError as error:
            raise EngineError(f"cannot write to {self.path}: {error.strerror}") from None

    def keep_only(self, wanted: Callable[[bytes], bool]) -> int:
        """Drop the records that are not `wanted`; returns how many. The file is replaced as a whole."""
        dropped = 0
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name + ".")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.fchmod(descriptor, os.fstat(self._file).st_mode & 0o777)
            with open(descriptor, "wb", closefd=False) as copy:
                for _, text in whole_lines(self.path):
                    if wanted(text):
                        copy.write(text)
                    else:
                        dropped += 1
            os.fsync(descriptor)
            os.replace(name, self.path)
        except BaseException:
            os.close(descriptor)
            os.unlink(name)
            raise
        os.close(self._file)
        self._file = descriptor
        return dropped

    def close(self) -> None:
        self._sync()
        os.close(self._file)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, text) of every record in a file, without a torn last line."""
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            if text.endswith(b"\n"):
                yield number, text


def _open_locked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"another run is writing to {path}") from None
    except OSError:
        pass  # a file system without locks: the user's own care must do
    return descriptor


def _cut_torn_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    whole = 0
    while end and not whole:
        start = max(0, end - 65536)
        whole = start + os.pread(descriptor, end - start, start).rfind(b"\n") + 1
        if whole == start:  # no line end in this piece
            whole = 0
        end = start
    os.ftruncate(descriptor, whole)
