"""What the user has chosen to look at on the engine screen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mlxbatch.engine.snapshot import SlotState, Snapshot

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


def request_name(snapshot: Snapshot, view: ViewState, request_id: str, label: str, client: str) -> str:
    """Whose request it is: the tab's title for our own, else the client's title and its own label."""
    if request_id in view.own:
        return view.own[request_id]
    name = label or request_id.rpartition("/")[2]
    info = next((info for info in snapshot.clients if info.client_id == client), None)
    owner = (info.title or info.kind) if info else client
    return f"{owner}: {name}" if owner and owner != name else name
