"""The text of one output as it grows: whole characters, stop strings, and what must be held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlxbatch.engine.api import StreamDecoder


class Piece(NamedTuple):
    text: str
    stop: str | None = None  # the stop string that was found


class OutputText:
    """Text is held back while its end could still become a stop string:

    given out ... | held: a proper prefix of some stop string | (next token)
    """

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, token_id: int, *, check_stop: bool = True) -> Piece:
        """Add a token. After a Piece with `stop` nothing more may be pushed. `check_stop` False (min_tokens) lets
        stop strings pass."""
        return self._add(self._decoder.push(token_id), check_stop=check_stop, last=False)

    def finish(self) -> Piece:
        """Everything that was held back. A stop string may still appear in a character that was incomplete."""
        return self._add(self._decoder.finish(), check_stop=True, last=True)

    def _add(self, text: str, *, check_stop: bool, last: bool) -> Piece:
        if not self._stop:
            return Piece(text)
        held = self._held + text
        if not check_stop:
            self._held = ""
            return Piece(held)
        found = [(held.find(stop), stop) for stop in self._stop if stop in held]
        if found:
            at, stop = min(found, key=lambda item: (item[0], -len(item[1])))
            self._held = ""
            return Piece(held[: at + len(stop)] if self._include_stop else held[:at], stop)
        keep = 0 if last else self._possible_start(held)
        self._held = held[len(held) - keep :] if keep else ""
        return Piece(held[: len(held) - keep] if keep else held)

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
