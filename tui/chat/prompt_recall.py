"""Going back through earlier prompts and forward again to what was being typed."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PromptRecall:
    """`load` gives earlier prompts, newest first; it is read when going back begins."""

    def __init__(self, load: Callable[[], Sequence[str]]) -> None:
        self._load = load
        self._prompts: Sequence[str] = ()
        self._index = -1  # -1 is what was being typed
        self._typed = ""

    def step(self, offset: int, current: str) -> str | None:
        """The text to show for one step back (-1) or forward (+1); None at either end."""
        if self._index < 0 or current != self._prompts[self._index]:
            # Nothing recalled, or it was changed since: what stands there is what is being typed.
            self._prompts = [prompt for prompt in self._load() if prompt != current]
            self._index, self._typed = -1, current
        index = self._index - offset
        if not -1 <= index < len(self._prompts):
            return None
        self._index = index
        return self._typed if index < 0 else self._prompts[index]
