"""A list to choose from by typing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option


@dataclass(frozen=True, slots=True)
class PickerItem:
    """`id` is what the picker returns; `content` may have several lines."""

    id: str
    content: Content


Source = Callable[[str], Sequence[PickerItem]]


class Picker(ModalScreen[tuple[str, str] | None]):
    """Returns ("choose" or "delete", item id), or None on Escape. `source` gives the items for what is typed."""

    BINDINGS: ClassVar = [
        Binding("escape", "cancel", show=False),
        Binding("down", "step(1)", show=False),
        Binding("up", "step(-1)", show=False),
        Binding("pagedown", "step(8)", show=False),
        Binding("pageup", "step(-8)", show=False),
        Binding("ctrl+d", "delete", show=False, priority=True),
    ]

    def __init__(
        self,
        title: str,
        source: Source,
        *,
        placeholder: str = "type to filter",
        hint: str = "⏎ choose · Esc back",
        empty: str = "nothing matches",
        query: str = "",
        highlighted: int = 0,
        can_delete: bool = False,
        on_highlight: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._title = title
        self._source = source
        self._placeholder = placeholder
        self._hint = hint
        self._empty = empty
        self._start_query = query
        self._start = highlighted
        self._can_delete = can_delete
        self._on_highlight = on_highlight

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog picker") as dialog:
            dialog.border_title = self._title
            dialog.border_subtitle = self._hint
            yield Input(self._start_query, placeholder=self._placeholder, compact=True, select_on_focus=False)
            yield OptionList(compact=True)
            yield Static(self._empty, classes="picker-empty", markup=False)

    def on_mount(self) -> None:
        self._fill(self._start_query, self._start)
        self.query_one(OptionList).can_focus = False
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _typed(self, event: Input.Changed) -> None:
        self._fill(event.value, 0)

    def _fill(self, query: str, highlighted: int) -> None:
        items = self._source(query)
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(item.content, id=item.id) for item in items])
        options.display = bool(items)
        self.query_one(".picker-empty").display = not items
        if items:
            options.highlighted = min(highlighted, len(items) - 1)

    @on(Input.Submitted)
    def _submitted(self) -> None:
        self._finish("choose")

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if self._on_highlight is not None and event.option_id is not None:
            self._on_highlight(event.option_id)

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        if event.option_id is not None:
            self.dismiss(("choose", event.option_id))

    def action_step(self, offset: int) -> None:
        if not self.is_mounted:
            return
        options = self.query_one(OptionList)
        if options.option_count:
            last = options.option_count - 1
            options.highlighted = min(last, max(0, (options.highlighted or 0) + offset))

    def action_delete(self) -> None:
        if self._can_delete and self.is_mounted:
            self._finish("delete")

    def action_cancel(self) -> None:
        self.dismiss(None)

    def _finish(self, what: str) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None and options.option_count:
            chosen = options.get_option_at_index(options.highlighted).id
            if chosen is not None:
                self.dismiss((what, chosen))


def filtered(items: Sequence[tuple[str, Content]]) -> Source:
    """A source over fixed items that keeps those which hold every word typed."""

    def source(query: str) -> list[PickerItem]:
        words = query.lower().split()
        return [
            PickerItem(item_id, content)
            for item_id, content in items
            if all(word in content.plain.lower() for word in words)
        ]

    return source
