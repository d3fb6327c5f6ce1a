"""The input file, read line by line as often as needed and never held in memory."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from mlxbatch.errors import UsageError

LONGEST_LINE = 64 * 2**20  # bytes; a longer line is one bad line, not an exhausted memory

_BOM = b"\xef\xbb\xbf"


class InputFile:
    """A file of lines, numbered from 1. A pipe, which cannot be read twice, is spooled to disk.

    Raises UsageError when the file cannot be opened.
    """

    def __init__(self, path: str, stdin: BinaryIO | None = None) -> None:
        self.name = "standard input" if path == "-" else path
        self.path = None if path == "-" else str(Path(path).resolve())
        try:
            source = (stdin or sys.stdin.buffer) if path == "-" else open(path, "rb")  # noqa: SIM115 - held open
            self._file: IO[bytes] = source if path != "-" and source.seekable() else _spooled(source)
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error.strerror}") from None

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return os.fstat(self._file.fileno()).st_size

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number, text without line end and BOM). Of a line longer than LONGEST_LINE more than LONGEST_LINE
        bytes are given, but not all. One iteration at a time."""
        self._file.seek(0)
        number = 0
        while line := self._file.readline(LONGEST_LINE + 2):
            number += 1
            ended = line.endswith(b"\n") or len(line) < LONGEST_LINE + 2
            text = line.removeprefix(_BOM) if number == 1 else line
            yield number, text.removesuffix(b"\n").removesuffix(b"\r")
            while not ended:
                rest = self._file.readline(LONGEST_LINE)
                ended = rest.endswith(b"\n") or not rest

    def head(self, count: int) -> list[bytes]:
        """The first `count` lines that are not blank."""
        found: list[bytes] = []
        for _, text in self.lines():
            if text.strip():
                found.append(text)
            if len(found) == count:
                break
        return found

    def close(self) -> None:
        self._file.close()


def _spooled(source: BinaryIO | IO[bytes]) -> IO[bytes]:
    copy = tempfile.TemporaryFile(prefix="mlxbatch-")  # noqa: SIM115 - held open
    shutil.copyfileobj(source, copy)
    copy.flush()
    return copy
