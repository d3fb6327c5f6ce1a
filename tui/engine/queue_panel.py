"""Requests that wait, and what happened lately."""

from __future__ import annotations

from datetime import datetime

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.tui.drawing import Line, Piece
from mlxbatch.tui.engine.view_state import ViewState, request_name
from mlxbatch.tui.numbers import count, seconds

_EVENT_ROLES = {
    "preempt": "warn",
    "evict": "warn",
    "error": "bad",
    "refuse": "bad",
    "cancel": "warn",
    "restart": "warn",
}


def waiting_title(snapshot: Snapshot) -> list[Piece]:
    return [
        ("waiting ", "title"),
        (count(snapshot.waiting_count), "strong" if snapshot.waiting_count else "dim"),
    ]


def waiting_foot(snapshot: Snapshot) -> list[Piece]:
    if not snapshot.waiting_count:
        return []
    return [("head: ", "dim"), (snapshot.head_reason or "admitted next", "warn")]


def waiting_rows(snapshot: Snapshot, view: ViewState, width: int, height: int) -> list[Line]:
    """The head of the queue first; the last row counts the rest."""
    if not snapshot.waiting_count:
        return [Line(("nothing waits", "dim"))]
    lines = []
    shown = snapshot.waiting[: max(1, height)]
    hidden = snapshot.waiting_count - len(shown)
    name_width = max(6, width - 29)
    for index, request in enumerate(shown):
        name = request_name(snapshot, view, request.request_id, request.label, request.client, name_width)
        line = Line((name, "text" if request.request_id in view.own else "dim"))
        line.add(f"{count(request.prompt_tokens):>7} tok ", "text")
        hit = f"hit {count(request.hit_tokens)}" if request.hit_tokens else ""
        line.add(f"{'preempted' if request.preempted else hit:<9} ", "warn" if request.preempted else "cached")
        last = index == len(shown) - 1
        line.add(f"{f'+{count(hidden)}' if hidden and last else seconds(request.waited):>7}", "dim")
        lines.append(line)
    return lines


def compact_waiting_row(snapshot: Snapshot, view: ViewState, width: int) -> Line:
    """The head of the queue and as many names as fit."""
    line = Line((f"waiting {count(snapshot.waiting_count)}", "dim"))
    foot = [(piece, role) for piece, role in waiting_foot(snapshot)]
    room = width - sum(len(text) for text, _ in foot) - 2
    for index, request in enumerate(snapshot.waiting):
        name = request_name(snapshot, view, request.request_id, request.label, request.client, 18).rstrip()
        hit = f" (hit {count(request.hit_tokens)})" if request.hit_tokens else ""
        figures = f" {count(request.prompt_tokens)} tok{hit}" if index == 0 else ""
        text = ("  " if index == 0 else " · ") + name + figures
        if line.width + len(text) > room:
            break
        line.add(text, "text" if index == 0 else "dim")
    return line.right(foot, width)


def event_rows(snapshot: Snapshot, view: ViewState, width: int, height: int) -> list[Line]:
    """Newest last. With a followed slot, only what concerns its request."""
    events = snapshot.events
    followed = view.followed(snapshot)
    if followed is not None:
        events = tuple(event for event in events if event.request_id == followed.request_id)
    if not events:
        return [Line(("nothing yet", "dim"))]
    name_width = 22 if width >= 100 else 14
    lines = []
    for event in events[-height:] if height > 0 else ():
        moment = datetime.fromtimestamp(event.wall)
        stamp = moment.strftime("%H:%M:%S.") + str(moment.microsecond // 100_000)
        name = (
            request_name(snapshot, view, event.request_id, event.label, "", name_width)
            if event.request_id
            else " " * name_width
        )
        line = Line((stamp, "dim"), (f"  {event.kind:<8} ", _EVENT_ROLES.get(event.kind, "text")))
        line.add(name + "  ", "text").add(event.text, "dim")
        lines.append(line.fit(width))
    return lines
