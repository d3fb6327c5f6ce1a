"""The engine screen: what the batch, the KV blocks and the steps are doing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.events import Key
from textual.screen import Screen

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import MlxbatchError
from mlxbatch.tui.canvas import Canvas
from mlxbatch.tui.chat.message_header import short_model
from mlxbatch.tui.chat.tab_bar import COMPACT_BELOW, TabLabel, run_labels, tab_bar_line
from mlxbatch.tui.chat.workspace import EngineView as KnownEngine
from mlxbatch.tui.confirm import Confirm
from mlxbatch.tui.drawing import Line, Piece
from mlxbatch.tui.engine.pool_map import slot_mark
from mlxbatch.tui.engine.view import EngineView
from mlxbatch.tui.engine.view_state import ViewState
from mlxbatch.tui.key_hints import Hint, KeyHints
from mlxbatch.tui.keymap import Keymap, bindings
from mlxbatch.tui.numbers import size

_HINTS: tuple[Hint, ...] = (
    ("engine_chat", "chat"),
    ("1-9", "follow slot"),
    ("engine_cancel", "cancel"),
    ("engine_freeze", "freeze"),
    ("engine_sort", "sort"),
    ("engine_half", "half-blocks"),
    ("engine_metrics", "metrics file"),
    ("palette", "commands"),
    ("help", "help"),
    ("quit", "quit"),
)
_TOP_HINTS = tuple(hint for hint in _HINTS if hint[0] not in ("engine_chat", "palette"))


class EngineBar(Canvas):
    """The tabs, if there are any, then ENGINE, and the model on the right."""

    def __init__(self) -> None:
        super().__init__(id="engine-bar")
        self._tabs: Sequence[TabLabel] = ()
        self._right: Sequence[Piece] = ()
        self._runs: Sequence[str] = ()

    def show(self, tabs: Sequence[TabLabel], right: Sequence[Piece], runs: Sequence[str]) -> None:
        self._tabs, self._right, self._runs = tabs, right, runs
        self.redraw()

    def draw(self, width: int, height: int) -> list[Line]:
        here: list[Piece] = [("│", "frame"), (" ENGINE ", "cursor"), (" ", "text")]
        if not self._tabs:
            return [Line(*here[1:], (" · ".join(self._runs), "dim")).right(self._right, width)]
        right_width = sum(len(text) for text, _ in self._right)
        tabs = tab_bar_line(self._tabs, None, width - right_width - 10, self._runs).line
        return [tabs.extend(here).right(self._right, width)]


class EngineScreen(Screen[None]):
    """Shows one engine. `own` gives the engine-wide ids of this interface's requests with their titles;
    `open_chat`, when given, opens the tab of one of them."""

    BINDINGS: ClassVar = bindings(
        "engine_chat",
        "engine_cancel",
        "engine_freeze",
        "engine_sort",
        "engine_half",
        "engine_group",
        "engine_metrics",
        "engine_up",
        "engine_down",
        "engine_open",
        "palette",
        "help",
        "quit",
    )

    def __init__(
        self,
        engine: Callable[[], KnownEngine],
        keymap: Keymap,
        clock: Callable[[], float],
        *,
        own: Callable[[], Mapping[str, str]] = dict,
        tabs: Callable[[], Sequence[TabLabel]] = tuple,
        open_chat: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._keymap = keymap
        self._clock = clock
        self._own = own
        self._tabs = tabs
        self._open_chat = open_chat
        self._view = ViewState()
        self._frozen: tuple[Snapshot, float] | None = None  # and when it had arrived
        self._bar = EngineBar()
        self._body = EngineView()

    def compose(self) -> ComposeResult:
        yield self._bar
        yield self._body
        yield KeyHints(_HINTS if self._open_chat is not None else _TOP_HINTS, self._keymap)

    def on_mount(self) -> None:
        self.sync()

    def on_screen_resume(self) -> None:
        self.sync()

    def sync(self) -> None:
        engine = self._engine()
        snapshot, arrived = self._frozen or (engine.snapshot, engine.arrived)
        self._view = replace(self._view, own=dict(self._own()), frozen=0.0 if self._frozen else None)
        width = self.size.width
        runs = run_labels(snapshot, compact=width < COMPACT_BELOW)
        self._bar.show(self._tabs(), model_facts(snapshot, width), runs)
        self._body.show(snapshot, self._view, status=engine.status.text, age=lambda: self._clock() - arrived)

    @property
    def snapshot(self) -> Snapshot | None:
        return self._frozen[0] if self._frozen else self._engine().snapshot

    def change(self, view: ViewState) -> None:
        self._view = view
        self.sync()

    def on_key(self, event: Key) -> None:
        """A slot's own mark follows it; again lets go."""
        if event.character is not None and event.character.isdigit() and event.character != "0":
            event.stop()
            self.follow(int(event.character) - 1)

    @on(EngineView.SlotClicked)
    def _clicked(self, event: EngineView.SlotClicked) -> None:
        self.follow(event.slot)

    def follow(self, slot: int) -> None:
        self.change(replace(self._view, follow=None if self._view.follow == slot else slot))

    def action_follow_step(self, offset: int) -> None:
        if self.snapshot is None or not self.snapshot.slots:
            return
        order = [slot.slot for slot in self._view.sorted_slots(self.snapshot)]
        if self._view.follow in order:
            place = min(len(order) - 1, max(0, order.index(self._view.follow) + offset))
        else:
            place = 0 if offset > 0 else len(order) - 1
        self.change(replace(self._view, follow=order[place]))

    def action_freeze(self) -> None:
        engine = self._engine()
        if self._frozen is None and engine.snapshot is not None:
            self._frozen = (engine.snapshot, engine.arrived)
        else:
            self._frozen = None
        self.sync()

    def action_sort(self) -> None:
        view = self._view.next_sort()
        self.change(view)
        self.notify(f"rows by {view.sort}", timeout=2)

    def action_half_blocks(self) -> None:
        self.change(replace(self._view, half_blocks=not self._view.half_blocks))

    def action_group(self) -> None:
        if self.snapshot is not None and len(self.snapshot.pools) > 1:
            self.change(replace(self._view, group=(self._view.group + 1) % len(self.snapshot.pools)))
        else:
            self.notify("this model has one KV group", timeout=2)

    def action_cancel(self) -> None:
        """Cancel the followed request; another client's only after a question."""
        slot = self._view.followed(self.snapshot) if self.snapshot is not None else None
        if slot is None:
            self.notify("follow a row first (1-9, arrows or a click), then x cancels it", timeout=3)
            return
        if slot.request_id in self._own():
            self._cancel(slot.request_id)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._cancel(slot.request_id)

        owner = slot.client or "another client"
        question = f"Slot {slot_mark(slot.slot)} belongs to {owner}. Cancel its request {slot.request_id}?"
        self.app.push_screen(Confirm(question), answered)

    def _cancel(self, request_key: str) -> None:
        self.run_worker(self._engine().link.cancel(request_key))

    def action_open_chat(self) -> None:
        slot = self._view.followed(self.snapshot) if self.snapshot is not None else None
        if slot is not None and self._open_chat is not None and slot.request_id in self._own():
            self._open_chat(slot.request_id)

    def action_metrics(self) -> None:
        self.run_worker(self._write_metrics())

    async def _write_metrics(self) -> None:
        """The engine's counters, as `--stats` writes them."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        target = Path(f"mlxbatch-stats-{stamp}.json").absolute()
        try:
            stats = await self._engine().link.stats()
            with target.open("x", encoding="utf-8") as file:
                json.dump(stats, file, indent=2)
        except MlxbatchError as error:
            self.notify(str(error), severity="error", markup=False)
        except OSError as error:
            self.notify(f"cannot write {target}: {error.strerror}", severity="error", markup=False)
        else:
            self.notify(f"written to {target}", markup=False)


def model_facts(snapshot: Snapshot | None, width: int) -> list[Piece]:
    """Model, machine and KV format, as far as there is room."""
    if snapshot is None:
        return []
    model, machine = snapshot.model, snapshot.machine
    parts = [short_model(model.name)]
    chip = f"{machine.chip} " if machine.chip and width >= 100 else ""
    if machine.memory_bytes:
        parts.append(f"{chip}{machine.memory_bytes / 2**30:.0f} GB")
    if width >= 100:
        parts += [f"block {model.block_size}", f"{model.kv_dtype} KV" if model.kv_dtype else ""]
        parts.append(f"{size(snapshot.memory.active)} used" if snapshot.memory.active else "")
    head, *rest = [part for part in parts if part]
    return [(head, "text"), ("".join(f" · {part}" for part in rest) + " ", "dim")]
