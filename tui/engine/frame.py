"""The whole engine screen as lines: framed panels where there is room, ruled sections on 80x24."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.tui.drawing import Line, Piece, beside, box, join, rule
from mlxbatch.tui.engine.efficiency_panel import efficiency_foot, efficiency_rows, efficiency_title
from mlxbatch.tui.engine.pool_panel import (
    compact_pool_rows,
    compact_pool_title,
    pool_foot,
    pool_height,
    pool_rows,
    pool_shares,
    pool_title,
)
from mlxbatch.tui.engine.queue_panel import (
    compact_waiting_row,
    event_rows,
    waiting_foot,
    waiting_rows,
    waiting_title,
)
from mlxbatch.tui.engine.rates_panel import compact_rate_rows, counter_rows, percentile_rows, rate_rows
from mlxbatch.tui.engine.slots_panel import followed_row, slot_rows, slots_title, step_summary
from mlxbatch.tui.engine.tape_panel import compact_tape_title, tape_foot, tape_rows, tape_title
from mlxbatch.tui.engine.view_state import ViewState
from mlxbatch.tui.numbers import rate, seconds
from mlxbatch.tui.verdict import Verdict, judge, row_cap

FULL_WIDTH = 110  # least size of the framed layout
FULL_HEIGHT = 30
_RATES_HEIGHT = 11  # two rates, four rows of percentiles, two of counters, a gap, the frame


@dataclass(slots=True)
class EngineFrame:
    """The lines, and which of them show a sequence (line number to slot), for the mouse."""

    lines: list[Line] = field(default_factory=list)
    slot_lines: dict[int, int] = field(default_factory=dict)


def engine_frame(snapshot: Snapshot, view: ViewState, width: int, height: int, age: float = 0.0) -> EngineFrame:
    """The body of the engine screen, verdict line first. `age` is how long ago the snapshot arrived."""
    frame = EngineFrame([verdict_line(snapshot, view, judge(snapshot, age), width)])
    followed = followed_row(snapshot, view)
    if followed is not None:
        frame.lines.append(followed)
    if width >= FULL_WIDTH and height >= FULL_HEIGHT:
        _full(frame, snapshot, view, width, height)
    else:
        _compact(frame, snapshot, view, width, height)
    frame.lines = [line.fit(width) for line in frame.lines[:height]]
    return frame


def verdict_line(snapshot: Snapshot, view: ViewState, verdict: Verdict, width: int) -> Line:
    """What limits the engine, why the head of the queue waits, and the figures to judge by."""
    line = Line((f" {verdict.name} ", f"badge-{verdict.severity}"), (" ", "text"))
    slots = f"{len(snapshot.slots)}/{row_cap(snapshot)} slots"
    queue = f", {snapshot.waiting_count} waiting" if snapshot.waiting_count else ""
    reason = f": {verdict.reason}" if verdict.reason else ""
    used, cached = pool_shares(snapshot)
    kv = f"{used} in use + {cached} cached" if width >= FULL_WIDTH else f"{used} + {cached}"
    parts: list[list[Piece]] = [
        [(slots + queue, "strong"), (reason, verdict.severity if reason else "text")],
        [("KV ", "dim"), (kv, "text")],
        [(f"{rate(snapshot.rates.decode)} tok/s", "strong")],
    ]
    now = snapshot.eff.now
    if now is not None and now.rows:
        if now.efficiency:
            parts.append([(f"eff({now.rows}) {now.efficiency:.2f}", "text")])
        if now.of_roof is not None:
            parts.append([(f"{now.of_roof * 100:.0f} % of roof", "text")])
    right: list[Piece] = []
    if view.frozen is not None:
        right = [(f" ‖ frozen {seconds(view.frozen)} ", "badge-warn")]
    room = width - sum(len(text) for text, _ in right)
    while len(parts) > 1 and line.width + Line(*join(parts)).width > room:
        parts.pop()
    return line.extend(join(parts)).right(right, width)


def _full(frame: EngineFrame, snapshot: Snapshot, view: ViewState, width: int, height: int) -> None:
    room = height - len(frame.lines)
    side = max(44, min(64, width * 36 // 100))
    left = width - side
    events, tape = 4, 6
    upper = room - events - tape
    pool_least = 10
    batch = max(_RATES_HEIGHT, min(row_cap(snapshot) + 3, upper - pool_least))
    pool = min(upper - batch, max(pool_least + 2, pool_height(snapshot, view, left - 4)))
    spare = upper - batch - pool
    events += spare

    rows = slot_rows(snapshot, view, left - 4, batch - 2)
    for index, row in enumerate(rows):
        if row.slot is not None:
            frame.slot_lines[len(frame.lines) + 1 + index] = row.slot
    slots = box(slots_title(snapshot), [row.line for row in rows], left, batch, step_summary(snapshot))
    gap = [Line()] if batch > 10 else []
    rates = [
        *rate_rows(snapshot, side - 4),
        *gap,
        *percentile_rows(snapshot, side - 4),
        *counter_rows(snapshot),
    ]
    rate_title: list[Piece] = [("throughput · latency", "title"), (", last 60 s", "dim")]
    frame.lines += beside(slots, box(rate_title, rates, side, batch))

    cells, per_cell = pool_rows(snapshot, view, left - 4, pool - 2)
    blocks = box(pool_title(snapshot, view, per_cell), cells, left, pool, pool_foot(snapshot, view))
    waiting_height = min(max(3, min(snapshot.waiting_count, 12) + 2), max(4, pool - 9))
    waiting = box(
        waiting_title(snapshot),
        waiting_rows(snapshot, view, side - 4, waiting_height - 2),
        side,
        waiting_height,
        waiting_foot(snapshot),
    )
    curve_height = pool - waiting_height
    curve = box(
        efficiency_title(snapshot),
        efficiency_rows(snapshot, side - 4, curve_height - 2),
        side,
        curve_height,
        efficiency_foot(snapshot),
    )
    frame.lines += beside(blocks, [*waiting, *curve])

    inner = width - 4
    frame.lines += box(
        tape_title(snapshot, inner),
        tape_rows(snapshot, inner, tape - 2),
        width,
        tape,
        tape_foot(snapshot, inner),
    )
    frame.lines += box([("events", "title")], event_rows(snapshot, view, inner, events - 2), width, events)


def _compact(frame: EngineFrame, snapshot: Snapshot, view: ViewState, width: int, height: int) -> None:
    room = height - len(frame.lines)
    inner = width - 1
    figures = [*compact_rate_rows(snapshot, inner), compact_waiting_row(snapshot, view, inner)]
    tape_height = 3 if room >= 18 else 2
    map_height = 2 if room < 26 else min(6, room - 24)
    # Three rules, one head, then whatever is left belongs to the sequences.
    slots_height = max(3, min(row_cap(snapshot) + 1, room - 4 - tape_height - map_height - len(figures)))

    frame.lines.append(rule([*slots_title(snapshot), (" · ", "faint"), *step_summary(snapshot)], width))
    for row in slot_rows(snapshot, view, inner, slots_height):
        if row.slot is not None:
            frame.slot_lines[len(frame.lines)] = row.slot
        frame.lines.append(Line((" ", "text")).extend(row.line.pieces))

    cells, per_cell = compact_pool_rows(snapshot, view, inner - 1, map_height)
    frame.lines.append(rule(compact_pool_title(snapshot, view, per_cell), width))
    frame.lines += [Line((" ", "text")).extend(line.pieces) for line in cells]

    frame.lines.append(rule(compact_tape_title(snapshot, inner), width))
    frame.lines += [Line((" ", "text")).extend(line.pieces) for line in tape_rows(snapshot, inner - 1, tape_height)]
    frame.lines.append(Line().fit(width, "─", "frame"))
    frame.lines += [Line((" ", "text")).extend(line.pieces) for line in figures]
    spare = height - len(frame.lines)
    if spare > 2:
        frame.lines.append(rule([("events", "title")], width))
        events = event_rows(snapshot, view, inner, spare - 1)
        frame.lines += [Line((" ", "text")).extend(line.pieces) for line in events]
