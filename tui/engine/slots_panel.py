"""One row for each running sequence."""

from __future__ import annotations

from typing import NamedTuple

from mlxbatch.engine.snapshot import SlotState, Snapshot
from mlxbatch.tui.drawing import Line, Piece, progress
from mlxbatch.tui.engine.pool_map import slot_mark, slot_role
from mlxbatch.tui.engine.view_state import ViewState, request_name
from mlxbatch.tui.numbers import UNKNOWN, count, milliseconds, rate
from mlxbatch.tui.verdict import row_cap

PHASES = {"prefill": "prefill", "decode": "decode", "recompute": "redo"}
_FIXED = 57  # cells of all columns but the request's name


def slots_title(snapshot: Snapshot) -> list[Piece]:
    cap = row_cap(snapshot)
    pieces = [("batch ", "title"), (f"{len(snapshot.slots)}/{cap}", "strong")]
    if cap < snapshot.max_num_seqs:
        pieces.append((f" of {snapshot.max_num_seqs}", "dim"))
    return pieces


def step_summary(snapshot: Snapshot) -> list[Piece]:
    """What the last step did."""
    if not snapshot.steps:
        return [("no step yet", "dim")]
    last = snapshot.steps[-1]
    tokens = last.prefill_tokens + last.decode_rows
    return [
        (f"{snapshot.decode_rows} decode · {snapshot.prefill_rows} prefill · ", "dim"),
        (f"{count(tokens)}/{count(snapshot.max_num_batched_tokens)}", "text"),
        (" tokens this step", "dim"),
    ]


class SlotRow(NamedTuple):
    """A line of the table and the slot that it shows; None for the head and for remarks."""

    slot: int | None
    line: Line


def slot_rows(snapshot: Snapshot, view: ViewState, width: int, height: int) -> list[SlotRow]:
    """A head and one row for each sequence; a last line counts those that do not fit.

    In slot order free slots have their place too, so that a sequence never moves while it runs.
    """
    name_width = max(8, width - _FIXED)
    head = f"#  {'request':<{name_width}} phase   progress      gen/max  blk  shr  tok/s   ttft"
    rows = [SlotRow(None, Line((head, "dim")))]
    room = height - 1
    running = view.sorted_slots(snapshot)
    entries: list[tuple[int, SlotState | None]] = [(slot.slot, slot) for slot in running]
    if view.sort == "slot":
        taken = {slot.slot for slot in running}
        free = [number for number in range(row_cap(snapshot)) if number not in taken]
        entries += [(number, None) for number in free[: max(0, room - len(running))]]
        entries.sort(key=lambda entry: entry[0])
    shown = entries if len(entries) <= room else entries[: max(0, room - 1)]
    for number, slot in shown:
        if slot is None:
            rows.append(SlotRow(number, Line((slot_mark(number), "faint"), ("  ·", "faint"))))
        else:
            rows.append(SlotRow(number, _row(snapshot, view, slot, name_width)))
    if len(shown) < len(entries):
        rest = [slot for _, slot in entries[len(shown) :] if slot is not None]
        speed = sum(slot.tokens_per_second or 0.0 for slot in rest)
        text = f"   and {len(rest)} more rows, {rate(speed)} tok/s together"
        rows.append(SlotRow(None, Line((text, "dim"))))
    return rows


def _row(snapshot: Snapshot, view: ViewState, slot: SlotState, name_width: int) -> Line:
    followed = view.follow == slot.slot
    nth = f" #{slot.output_index + 1}" if slot.output_index else ""
    name = request_name(snapshot, view, slot.request_id, slot.label, slot.client, name_width - len(nth))
    line = Line((slot_mark(slot.slot), slot_role(slot.slot)))
    line.add(" ▶" if followed else "  ", "accent")
    mine = slot.request_id in view.own
    line.add(name + nth, "strong" if followed else "text" if mine else "dim")
    line.add(f" {PHASES[slot.phase]:<7} ", "decode" if slot.phase == "decode" else "prefill")
    line.extend(progress_bar(slot, 10))
    if slot.phase == "decode":
        figures = f"{slot.output_tokens}/{slot.max_tokens or '∞'}"
    else:
        figures = f"{slot.computed_tokens}/{slot.target_tokens}"
    line.add(f"{figures:>11}", "text")
    line.add(f"{slot.blocks:>5}", "text")
    line.add(f"{slot.shared_blocks or '·':>5}", "shared" if slot.shared_blocks else "faint")
    line.add(f"{rate(slot.tokens_per_second):>7}", "text" if slot.tokens_per_second else "faint")
    line.add(f"{milliseconds(slot.ttft):>7}", "text" if slot.ttft is not None else "faint")
    return line


def progress_bar(slot: SlotState, width: int) -> list[Piece]:
    """Decode ━━╌╌ of max_tokens; prefill ▓▓██░░: from the prefix cache, computed, still to come."""
    if slot.phase == "decode":
        bar = progress(slot.output_tokens, slot.max_tokens or 0, width)
        full = bar.count("━")
        return [(bar[:full], "decode"), (bar[full:], "faint")]
    bar = progress(slot.computed_tokens, slot.target_tokens, width, "█", "░")
    full = bar.count("█")
    cached = min(full, round(width * slot.cached_tokens / slot.target_tokens)) if slot.target_tokens else 0
    return [("▓" * cached, "cached"), ("█" * (full - cached), "prefill"), (bar[full:], "faint")]


def followed_row(snapshot: Snapshot, view: ViewState) -> Line | None:
    """Everything about the sequence that is followed, in one line."""
    slot = view.followed(snapshot)
    if slot is None:
        return None
    client = next((info for info in snapshot.clients if info.client_id == slot.client), None)
    where = f"{client.kind} (pid {client.pid})" if client else slot.client or UNKNOWN
    parts = [
        f"slot {slot_mark(slot.slot)}",
        f"{slot.request_id}",
        where,
        "interactive" if slot.priority == 0 else "batch",
        f"prompt {count(slot.prompt_tokens)} tok, {count(slot.cached_tokens)} from cache",
        f"tail {slot.tail_tokens} tok",
    ]
    if slot.preemptions:
        parts.append(f"preempted ×{slot.preemptions}")
    return Line((" ▶ ", "accent"), (" · ".join(parts), "text"))
