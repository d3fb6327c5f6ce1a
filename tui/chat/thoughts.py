"""Thinking told from answer in streamed text."""

from __future__ import annotations

from mlxbatch.models.tags import Piece, TagSplitter
from mlxbatch.process.answer_format import AnswerFormat


class Thoughts:
    """Splits one answer. What is a tool call to other programs is shown to a reader as part of the answer."""

    def __init__(self, answers: AnswerFormat) -> None:
        self._splitter = TagSplitter(answers.tags, answers.opening)

    def feed(self, text: str) -> tuple[str, str]:
        """(thinking, answer) that this text adds; what may be the beginning of a tag is held back."""
        return _sides(self._splitter.push(text))

    def close(self) -> tuple[str, str]:
        """What was held back, at the end."""
        return _sides(self._splitter.finish())


def _sides(pieces: list[Piece]) -> tuple[str, str]:
    thinking = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    return thinking, "".join(piece.text for piece in pieces if piece.kind != "reasoning")
