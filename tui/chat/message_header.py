"""The line above a message: whose it is, when, and what the engine counted."""

from __future__ import annotations

from datetime import datetime

from mlxbatch.history.records import MessageRecord
from mlxbatch.tui.chat.answer import Answer
from mlxbatch.tui.drawing import Line, Piece, join
from mlxbatch.tui.numbers import count, rate, seconds

_ENDINGS = {
    "stopped": ("■ stopped", "warn"),
    "interrupted": ("■ interrupted", "warn"),
    "length": ("▪ cut at max_tokens", "warn"),
    "error": ("✗ failed", "bad"),
}
_HINTS_USER = (("y", "copy"), ("e", "edit"), ("b", "branch"), ("r", "answer again"))
_HINTS_ANSWER = (("y", "copy"), ("c", "code"), ("b", "branch"), ("r", "regenerate"))


def header_line(
    message: MessageRecord,
    width: int,
    *,
    answer: Answer | None = None,
    version: tuple[int, int] = (1, 1),
    focused: bool = False,
    now: float | None = None,
) -> Line:
    """`answer` is given while the message streams; `version` is its place among its siblings. With `now`, a
    message of another day has its date."""
    line = Line()
    who = "you" if message.role == "user" else short_model(message.model) or "assistant"
    when = moment(message.created, message.created if now is None else now)
    parts: list[list[Piece]] = [[(who, "title")], [(when, "dim")]]
    if message.role == "assistant":
        parts += _figures(message, answer)
        if message.status in _ENDINGS:
            parts.append([_ENDINGS[message.status]])
    line.extend(join(parts))
    right: list[Piece] = []
    if focused:
        for key, what in _HINTS_USER if message.role == "user" else _HINTS_ANSWER:
            right += [(key, "key"), (f" {what}  ", "dim")]
    place, versions = version
    if versions > 1:
        right.append((f"‹ {place}/{versions} ›", "accent"))
    room = width - sum(len(text) for text, _ in right)
    while len(parts) > 2 and line.width > room - 1:
        parts.pop(2)
        line = Line(*join(parts))
    return line.right(right, width)


def _figures(message: MessageRecord, answer: Answer | None) -> list[list[Piece]]:
    figures = message.figures
    parts: list[list[Piece]] = []
    if answer is not None and not figures.output_tokens:
        return [[("…", "dim")]]
    if figures.output_tokens:
        parts.append([(f"{count(figures.output_tokens)} tok", "dim")])
    if figures.tokens_per_second:
        parts.append([(f"{rate(figures.tokens_per_second)} tok/s", "dim")])
    if figures.ttft is not None:
        parts.append([(f"TTFT {seconds(figures.ttft)}", "dim")])
    return parts


def thought_line(message: MessageRecord, *, folded: bool, thinking: bool) -> Line:
    """▸ thought for 3.1 s (148 tok)."""
    figures = message.figures
    spent = f" for {seconds(figures.reasoning_seconds)}" if figures.reasoning_seconds else ""
    tokens = f" ({count(figures.reasoning_tokens)} tok)" if figures.reasoning_tokens else ""
    verb = "thinking" if thinking else "thought"
    return Line(("▸ " if folded else "▾ ", "accent"), (f"{verb}{spent}{tokens}", "dim"))


def moment(then: float, now: float) -> str:
    """12:41 today, else the date before it."""
    at, today = datetime.fromtimestamp(then), datetime.fromtimestamp(now)
    if at.date() == today.date():
        return at.strftime("%H:%M")
    return at.strftime("%d %b %H:%M" if at.year == today.year else "%d %b %Y")


def short_model(name: str) -> str:
    """The last part of a repo id or path."""
    return name.rstrip("/").rpartition("/")[2]
