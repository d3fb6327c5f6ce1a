"""The text of one output as it grows: whole characters, stop strings, and what must be held back."""

from __future__ import annotations

from collections.abc import Sequence

from mlxbatch.engine.api import StreamDecoder


class OutputText:
    """Text is held back while its end could still become a stop string:

        given out ... | held: a proper prefix of some stop string | (next token)

    `found_stop` is the stop string that ended the text; nothing may be pushed after it.
    """

    __slots__ = ("_decoder", "_held", "_include_stop", "_stop", "found_stop")

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self.found_stop: str | None = None
        self._decoder = decoder
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""

    def push(self, token_id: int, *, check_stop: bool = True) -> str:
        """Add a token; returns the text that may be given out. `check_stop` False (min_tokens) lets stop strings
        pass."""
        text = self._decoder.push(token_id)
        return self._add(text, check_stop=check_stop, last=False) if self._stop else text

    def finish(self) -> str:
        """Everything that was held back. A stop string may still appear in a character that was incomplete."""
        text = self._decoder.finish()
        return self._add(text, check_stop=True, last=True) if self._stop else text

    def _add(self, text: str, *, check_stop: bool, last: bool) -> str:
        held = self._held + text
        if not check_stop:
            self._held = ""
            return held
        found = [(held.find(stop), stop) for stop in self._stop if stop in held]
        if found:
            at, stop = min(found, key=lambda item: (item[0], -len(item[1])))
            self._held = ""
            self.found_stop = stop
            return held[: at + len(stop)] if self._include_stop else held[:at]
        keep = 0 if last else self._possible_start(held)
        self._held = held[len(held) - keep :] if keep else ""
        return held[: len(held) - keep] if keep else held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
