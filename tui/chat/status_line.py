"""The line below the composer: what the tab's answer is doing and with which settings."""

from __future__ import annotations

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.history.records import ChatRecord
from mlxbatch.tui.chat.session import ChatSession, TabState
from mlxbatch.tui.chat.tab_bar import STATE_MARKS, STATE_WORDS
from mlxbatch.tui.drawing import Line, Piece, join
from mlxbatch.tui.engine_link import LinkStatus
from mlxbatch.tui.numbers import count, percent, rate, short
from mlxbatch.tui.verdict import row_cap

_SHORT = {
    "temperature": "T",
    "top_p": "p",
    "top_k": "k",
    "min_p": "min p",
    "repetition_penalty": "rep",
    "presence_penalty": "pres",
    "frequency_penalty": "freq",
    "max_tokens": "max",
    "seed": "seed",
}


def status_line(
    session: ChatSession,
    snapshot: Snapshot | None,
    link: LinkStatus,
    width: int,
    *,
    flash: str = "",
    saved: str = "",
    compact: bool = False,
) -> Line:
    """`flash` is a passing remark that takes the right-hand side; `saved` when the history was written."""
    state = session.state(snapshot)
    parts: list[list[Piece]] = [_state(session, snapshot, state, link)]
    answer = session.answer
    if answer is not None:
        speed = answer.tokens_per_second()
        if speed is not None:
            parts.append([(f"{rate(speed)} tok/s", "text")])
        if answer.output_tokens:
            parts.append([(f"{count(answer.output_tokens)} tok", "text")])
    parts += [_context(session, compact)]
    parts += [_settings(session.chat)]
    if compact and snapshot is not None:
        parts.append([(f"batch {len(snapshot.slots)}/{row_cap(snapshot)}", "dim")])
        parts.append([(f"{snapshot.waiting_count} waiting", "dim")])
    right: list[Piece] = []
    if flash:
        right = [(f"{flash} ", "accent")]
    elif saved and not compact:
        right = [(f"saved {saved} ", "faint")]
    room = width - sum(len(text) for text, _ in right) - 1
    shown = [part for part in parts if part]
    while len(shown) > 1 and 1 + Line(*join(shown)).width > room:
        shown.pop()
    return Line((" ", "text")).extend(join(shown)).right(right, width)


def _state(session: ChatSession, snapshot: Snapshot | None, state: TabState, link: LinkStatus) -> list[Piece]:
    if link.state in ("starting", "restarting"):
        return [("○ ", "warn"), (link.text or "starting the engine", "text")]
    if link.state == "lost":
        return [("✗ ", "bad"), (link.text or "the engine is gone", "bad")]
    if session.answer is not None and session.answer.phase == "stopping":
        return [("■ ", "warn"), ("stopping", "text")]
    if state == "prefill" and snapshot is not None and session.answer is not None:
        key = session.link.request_key(session.answer.request_id)
        slot = next((slot for slot in snapshot.slots if slot.request_id == key), None)
        if slot is not None and slot.target_tokens:
            done = percent(slot.computed_tokens, slot.target_tokens)
            return [("◐ ", "prefill"), (f"reading the prompt {done}", "text")]
    if state == "waiting" and snapshot is not None and snapshot.head_reason:
        return [("○ ", "warn"), (f"waiting: {snapshot.head_reason}", "text")]
    mark, role = STATE_MARKS[state]
    return [(f"{mark} " if mark else "", role), (STATE_WORDS[state], "text" if mark else "dim")]


def _context(session: ChatSession, compact: bool) -> list[Piece]:
    used, limit = session.context_tokens(), session.link.max_model_len
    if used is None:
        return [(f"context {short(limit)}", "dim")] if limit else []
    role = "warn" if limit and used > 0.8 * limit else "text"
    text = f"{count(used)}/{short(limit) if compact else count(limit)}" if limit else count(used)
    return [(text, role), (" ctx", "dim")]


def _settings(chat: ChatRecord) -> list[Piece]:
    parts = [f"{_SHORT.get(name, name)} {value}" for name, value in chat.sampling.items()]
    pieces: list[Piece] = [(" ".join(parts), "dim")] if parts else []
    if chat.system_prompt:
        words = " ".join(chat.system_prompt.split())
        shown = words if len(words) <= 24 else words[:23] + "…"
        pieces += [(" · " if pieces else "", "faint"), (f"system: {shown}", "dim")]
    return pieces
