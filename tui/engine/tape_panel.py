"""The step tape: one column for each step."""

from __future__ import annotations

from collections.abc import Sequence

from mlxbatch.engine.snapshot import Snapshot, StepMark
from mlxbatch.tui.drawing import Line, Piece, column
from mlxbatch.tui.numbers import count, seconds
from mlxbatch.tui.verdict import row_cap


def tape_title(snapshot: Snapshot, width: int) -> list[Piece]:
    marks = _visible(snapshot, width)
    prefill = max((mark.prefill_tokens for mark in marks), default=0)
    return [
        ("steps  ", "title"),
        ("█ prefill tokens", "prefill"),
        (f" to {count(prefill)}  " if prefill else "  ", "dim"),
        ("▅ decode rows", "decode"),
        (f" to {_row_top(snapshot, marks)}  ", "dim"),
        ("✕ preemption", "bad"),
        ("  ! off target", "warn"),
    ]


def compact_tape_title(snapshot: Snapshot, width: int) -> list[Piece]:
    pieces: list[Piece] = [
        ("steps ", "title"),
        ("█ prefill ", "prefill"),
        ("▅ decode ", "decode"),
        ("✕ preempt", "bad"),
        (" · ", "faint"),
    ]
    return pieces + tape_foot(snapshot, width)


def tape_foot(snapshot: Snapshot, width: int) -> list[Piece]:
    marks = _visible(snapshot, width)
    if not marks:
        return [("no step yet", "dim")]
    span = marks[-1].ended - marks[0].ended + marks[0].seconds
    return [
        (f"{len(marks)} steps · {seconds(span)} · last ", "dim"),
        (seconds(marks[-1].seconds), "text"),
    ]


def tape_rows(snapshot: Snapshot, width: int, height: int) -> list[Line]:
    """Prefill tokens in all rows but the last, decode rows in the last; the newest step at the right.

    A preemption (✕) or a step off its latency target (!) takes the top cell of its column.
    """
    marks = _visible(snapshot, width)
    token_top = max((mark.prefill_tokens for mark in marks), default=0)
    row_top = _row_top(snapshot, marks)
    upper = height - 1
    columns = [column(mark.prefill_tokens, token_top, upper) for mark in marks]
    lines = []
    for row in range(upper):
        line = Line()
        for mark, cells in zip(marks, columns, strict=True):
            if row == 0 and mark.preemptions:
                line.add("✕", "bad")
            elif row == 0 and mark.off_target:
                line.add("!", "warn")
            else:
                line.add(cells[row], "prefill")
        lines.append(_merged(line))
    rows = "".join(column(mark.decode_rows, row_top, 1) for mark in marks)
    lines.append(Line((rows, "decode")))
    return lines


def _visible(snapshot: Snapshot, width: int) -> Sequence[StepMark]:
    return snapshot.steps[-width:] if width > 0 else ()


def _row_top(snapshot: Snapshot, marks: Sequence[StepMark]) -> int:
    return max(row_cap(snapshot), max((mark.decode_rows for mark in marks), default=0))


def _merged(line: Line) -> Line:
    """Neighbouring pieces of one role become one, which draws faster."""
    merged = Line()
    run, last = "", ""
    for text, role in line.pieces:
        if role != last and run:
            merged.add(run, last)
            run = ""
        run, last = run + text, role
    return merged.add(run, last)
