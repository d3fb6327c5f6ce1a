"""What the engine does right now, beside the chat."""

from __future__ import annotations

from mlxbatch.engine.snapshot import SlotState, Snapshot
from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.drawing import Line, Piece, box, clip, sparkline
from mlxbatch.tui.engine.pool_map import slot_mark, slot_role
from mlxbatch.tui.engine.pool_panel import chosen_pool, compact_pool_rows, pool_shares
from mlxbatch.tui.engine.rates_panel import hit_rate
from mlxbatch.tui.engine.slots_panel import progress_bar
from mlxbatch.tui.engine.view_state import ViewState, request_name
from mlxbatch.tui.numbers import UNKNOWN, count, percent, rate, seconds
from mlxbatch.tui.verdict import row_cap

WIDTH = 36
_NOW_HEIGHT = 6


def sidebar_lines(snapshot: Snapshot, view: ViewState, width: int, height: int, engine_key: str) -> list[Line]:
    """Three frames: the rows of the batch, the KV pool, and the rates of the moment."""
    rows = row_cap(snapshot)
    batch_height = min(max(rows, 1) + 2, max(3, height - _NOW_HEIGHT - 6))
    pool_height = min(8, height - batch_height - _NOW_HEIGHT)
    lines = _batch(snapshot, view, width, batch_height)
    if pool_height >= 3:
        lines += _pool(snapshot, view, width, pool_height)
    lines += _now(snapshot, width, engine_key)
    return lines[:height]


def _batch(snapshot: Snapshot, view: ViewState, width: int, height: int) -> list[Line]:
    by_slot = {slot.slot: slot for slot in snapshot.slots}
    room = height - 2
    rows = row_cap(snapshot)
    running = sorted(by_slot)
    numbers = list(range(rows))
    if rows > room:  # running ones first, free ones as far as there is room
        numbers = sorted([*running, *(number for number in numbers if number not in by_slot)][:room])
    shown = numbers if len(running) <= room else running[: room - 1]
    body = [_batch_row(snapshot, view, number, by_slot.get(number), width - 4) for number in shown]
    if len(running) > len(shown):
        body.append(Line((f"  and {len(running) - len(shown)} more rows", "dim")))
    waiting = snapshot.waiting_count
    foot: list[Piece] = [(f"{count(waiting)} waiting", "warn" if waiting else "dim")]
    title: list[Piece] = [("batch ", "title"), (f"{len(snapshot.slots)}/{rows}", "strong")]
    return box(title, body, width, height, foot)


def _batch_row(snapshot: Snapshot, view: ViewState, number: int, slot: SlotState | None, width: int) -> Line:
    line = Line((f"{slot_mark(number)} ", slot_role(number) if slot else "faint"))
    if slot is None:
        return line.add("·", "faint")
    name = request_name(snapshot, view, slot.request_id, slot.label, slot.client, width - 23)
    line.add(name + " ", "text" if slot.request_id in view.own else "dim")
    if slot.phase == "decode":
        line.add("decode ", "decode").extend(progress_bar(slot, 6))
        return line.add(f"{rate(slot.tokens_per_second):>5}/s"[-7:], "text")
    done = percent(slot.computed_tokens, slot.target_tokens)
    line.add("prefill " if slot.phase == "prefill" else "redo    ", "prefill")
    return line.extend(progress_bar(slot, 6)).add(f"{done:>6}", "text")


def _pool(snapshot: Snapshot, view: ViewState, width: int, height: int) -> list[Line]:
    used, cached = pool_shares(snapshot)
    cells, per_cell = compact_pool_rows(snapshot, view, width - 4, height - 2)
    title: list[Piece] = [("KV ", "title"), (used, "strong"), (f" in use + {cached} cached", "dim")]
    pool = chosen_pool(snapshot, view)
    foot: list[Piece] = [(f"1 cell = {per_cell} block{'s' if per_cell > 1 else ''}", "dim")] if pool else []
    return box(title, cells, width, height, foot)


def _now(snapshot: Snapshot, width: int, engine_key: str) -> list[Line]:
    rates = snapshot.rates
    bars = width - 4 - 22
    ttft = seconds(snapshot.ttft.p50) if snapshot.ttft.count else UNKNOWN
    tpot = seconds(snapshot.tpot.p50) if snapshot.tpot.count else UNKNOWN
    preempted = snapshot.counters.preemptions
    body = [
        Line(("decode ", "dim"), (f"{rate(rates.decode):>6}", "strong"), (" tok/s  ", "dim")).add(
            sparkline(rates.decode_history, bars), "decode"
        ),
        Line(("prefill", "dim"), (f"{rate(rates.prefill):>6}", "strong"), (" tok/s  ", "dim")).add(
            sparkline(rates.prefill_history, bars), "prefill"
        ),
        Line(("TTFT ", "dim"), (f"{ttft:>9}", "text"), ("   TPOT ", "dim"), (f"{tpot:>9}", "text")),
        Line(("hits ", "dim"), (f"{hit_rate(snapshot):>9}", "text"))
        .add("   preempt ", "dim")
        .add(f"{count(preempted):>6}", "bad" if snapshot.preemptions_last_minute else "text"),
    ]
    return box([("now", "title")], body, width, _NOW_HEIGHT, [(f"{engine_key} engine", "dim")])


class Sidebar(Canvas):
    """Drawn from the newest snapshot; says what is missing while there is none."""

    def __init__(self) -> None:
        super().__init__(id="sidebar")
        self._snapshot: Snapshot | None = None
        self._view = ViewState()
        self._status = ""
        self._engine_key = ""

    def show(self, snapshot: Snapshot | None, view: ViewState, status: str, engine_key: str) -> None:
        shown = (self._snapshot, self._view, self._status, self._engine_key)
        if shown[0] is snapshot and shown[1:] == (view, status, engine_key):
            return  # snapshots come four times a second, and this is asked ten times
        self._snapshot, self._view, self._status, self._engine_key = snapshot, view, status, engine_key
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        if self._snapshot is None:
            text = clip(self._status or "no engine yet", width - 4)
            return box([("engine", "title")], [Line((text, "dim"))], width, 3)
        return sidebar_lines(self._snapshot, self._view, width, height, self._engine_key)
