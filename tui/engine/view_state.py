"""What the user has chosen to look at on the engine screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.cells import cell_len

from mlxbatch.engine.snapshot import SlotState, Snapshot
from mlxbatch.tui.drawing import clip

Sort = Literal["slot", "tokens", "tok/s", "blocks"]
SORTS: tuple[Sort, ...] = ("slot", "tokens", "tok/s", "blocks")


@dataclass(frozen=True, slots=True)
class ViewState:
    """`follow` is the slot picked out. `own` gives the tab title of requests of this interface, by the
    engine-wide id that a Snapshot shows. `frozen` is the age of the frozen picture in seconds."""

    follow: int | None = None
    sort: Sort = "slot"
    frozen: float | None = None
    half_blocks: bool = False
    group: int = 0
    own: Mapping[str, str] = field(default_factory=dict)

    def next_sort(self) -> ViewState:
        return replace(self, sort=SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)])

    def sorted_slots(self, snapshot: Snapshot) -> list[SlotState]:
        slots = sorted(snapshot.slots, key=lambda slot: slot.slot)
        if self.sort == "tokens":
            slots.sort(key=lambda slot: slot.output_tokens, reverse=True)
        elif self.sort == "tok/s":
            slots.sort(key=lambda slot: slot.tokens_per_second or 0.0, reverse=True)
        elif self.sort == "blocks":
            slots.sort(key=lambda slot: slot.blocks, reverse=True)
        return slots

    def followed(self, snapshot: Snapshot) -> SlotState | None:
        return next((slot for slot in snapshot.slots if slot.slot == self.follow), None)


def request_name(snapshot: Snapshot, view: ViewState, request_id: str, label: str, client: str, width: int) -> str:
    """Whose request it is, in exactly `width` cells: the tab's title for our own, else the client's title
    and the request's own label. Where room is short, the client's title gives way first."""
    if request_id in view.own:
        return clip(view.own[request_id], width)
    name = label or request_id.rpartition("/")[2]
    info = next((info for info in snapshot.clients if info.client_id == client), None)
    owner = (info.title or info.kind) if info else ""
    room = width - cell_len(name) - 1
    if owner.startswith("run:") and cell_len(owner) > room:
        owner = "run"
    if not owner or owner == name or room < 3:
        return clip(name, width)
    return clip(f"{clip(owner, room).rstrip()} {name}", width)
