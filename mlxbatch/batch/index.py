"""The first pass over an input file: every line is checked, and 17 bytes of each are kept."""

from __future__ import annotations

import enum
import hashlib
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy as np

from mlxbatch.batch.formats import LineReader
from mlxbatch.batch.item import BatchItem, CustomId, LineError
from mlxbatch.batch.source import LONGEST_LINE, InputFile

DIGEST_BYTES = 16  # two different ids of a file share a digest with a probability below 1e-20
PROBLEMS_KEPT = 10
MODELS_KEPT = 8


class LineState(enum.IntEnum):
    BLANK = 0
    VALID = 1
    BAD = 2
    DUPLICATE = 3  # its id stands on an earlier line


@dataclass(slots=True)
class InputIndex:
    """The lines of one input file, by number (line 0 does not exist, and counts as blank)."""

    sha256: str
    size: int
    states: bytearray  # a LineState for each line
    digests: np.ndarray  # of the custom_id of each line, empty where none could be read
    order: np.ndarray  # line numbers, sorted by digest and, within one digest, by number
    problems: list[tuple[int, LineError]]  # the first PROBLEMS_KEPT
    named_models: Counter[str]  # the first MODELS_KEPT models that lines name
    chats: int
    answers: int

    @property
    def requests(self) -> int:
        """Lines that are not blank: each of them gets one record."""
        return len(self.states) - self.states.count(LineState.BLANK)

    @property
    def valid(self) -> int:
        return self.states.count(LineState.VALID)

    @property
    def bad(self) -> int:
        return self.requests - self.valid

    @property
    def completions(self) -> int:
        return self.valid - self.chats

    def line_of(self, custom_id: CustomId) -> int | None:
        """The first line with that id."""
        # numpy gives values without the zeros at their end.
        digest = digest_of(custom_id).rstrip(b"\0")
        place = bisect_left(self.order, digest, key=lambda line: self.digests[line])
        if place == len(self.order) or self.digests[self.order[place]] != digest:
            return None
        return int(self.order[place])


def digest_of(custom_id: CustomId) -> bytes:
    return hashlib.blake2b(repr(custom_id).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def read_line(reader: LineReader, number: int, text: bytes) -> BatchItem:
    """`reader.read`, with a limit on the length of a line."""
    if len(text) > LONGEST_LINE:
        raise LineError(f"the line is longer than {LONGEST_LINE // 2**20} MiB", code="line_too_long")
    return reader.read(number, text)


def index_input(source: InputFile, reader: LineReader) -> InputIndex:
    """Check every line, from the first to the last, holding one at a time."""
    content = hashlib.sha256()
    states, digests = bytearray(1), bytearray(DIGEST_BYTES)
    problems: list[tuple[int, LineError]] = []
    named_models: Counter[str] = Counter()
    chats = answers = 0
    for number, text in source.lines():
        content.update(text)
        content.update(b"\n")
        custom_id: CustomId | None = None
        state = LineState.BLANK
        if text.strip():
            try:
                item = read_line(reader, number, text)
            except LineError as error:
                state, custom_id = LineState.BAD, error.custom_id
                _keep(problems, number, error)
            else:
                state, custom_id = LineState.VALID, item.custom_id
                chats += item.is_chat
                answers += item.answers
                if item.named_model and (item.named_model in named_models or len(named_models) < MODELS_KEPT):
                    named_models[item.named_model] += 1
        states.append(state)
        digests += digest_of(custom_id) if custom_id is not None else bytes(DIGEST_BYTES)
    keys = np.frombuffer(digests, dtype=f"S{DIGEST_BYTES}")
    order = np.argsort(keys, kind="stable")
    index = InputIndex(content.hexdigest(), source.size, states, keys, order, problems, named_models, chats, answers)
    _mark_duplicates(index)
    return index


def duplicate_error(first: int) -> LineError:
    """It bears no custom_id: in the output that id belongs to the earlier line."""
    return LineError(f"the custom_id is already used on line {first}", code="duplicate_custom_id", param="custom_id")


def _mark_duplicates(index: InputIndex) -> None:
    keys = index.digests[index.order]
    for place in np.flatnonzero(keys[1:] == keys[:-1]) + 1:
        line = int(index.order[place])
        if index.states[line] == LineState.VALID:
            index.states[line] = LineState.DUPLICATE
            first = int(index.order[np.searchsorted(keys, keys[place])])
            _keep(index.problems, line, duplicate_error(first))


def _keep(problems: list[tuple[int, LineError]], line: int, error: LineError) -> None:
    """The PROBLEMS_KEPT of the lowest lines, in order."""
    if len(problems) < PROBLEMS_KEPT or line < problems[-1][0]:
        problems.append((line, error))
        problems.sort(key=lambda problem: problem[0])
        del problems[PROBLEMS_KEPT:]
