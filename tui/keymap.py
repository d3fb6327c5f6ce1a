"""Every key of the interface in one table. `[chat.keymap]` in config.toml gives an action other keys.

Left alone, since terminals or macOS use them: Ctrl+I, Ctrl+M and Ctrl+[ (Tab, Enter, Escape),
Ctrl+arrows (Mission Control), and Ctrl+A/E/K/U/W, which edit text.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from textual.binding import Binding, BindingType

from mlxbatch.errors import UsageError


@dataclass(frozen=True, slots=True)
class Action:
    """`id` names the action in the keymap; `call` is the Textual action; `keys` are alternatives."""

    id: str
    call: str
    keys: str
    label: str
    group: str

    def binding(self) -> Binding:
        return Binding(self.keys, self.call, self.label, id=self.id, show=False, priority=False)


CHAT = "Chat"
COMPOSER = "Writing"
MESSAGES = "In the messages (Up from the first line)"
ENGINE = "Engine screen"

ACTIONS: tuple[Action, ...] = (
    Action("stop", "screen.stop", "escape", "stop the answer", CHAT),
    Action("regenerate", "screen.regenerate", "ctrl+r", "regenerate the last answer", CHAT),
    Action("new", "screen.new_tab", "ctrl+n", "new tab", CHAT),
    Action("tabs", "screen.tabs", "ctrl+t", "switch tab", CHAT),
    Action("next_tab", "screen.step_tab(1)", "ctrl+pagedown,alt+right", "next tab", CHAT),
    Action("previous_tab", "screen.step_tab(-1)", "ctrl+pageup,alt+left", "previous tab", CHAT),
    Action("history", "screen.history", "ctrl+s", "search the history", CHAT),
    Action("model", "screen.model", "ctrl+l", "choose the model", CHAT),
    Action("settings", "screen.settings", "f2", "system prompt and sampling", CHAT),
    Action("sidebar", "screen.sidebar", "ctrl+b", "side bar", CHAT),
    Action("engine", "app.engine", "ctrl+g", "engine screen", CHAT),
    Action("palette", "app.commands", "ctrl+p", "all commands", CHAT),
    Action("help", "app.help", "f1", "this help", CHAT),
    Action("quit", "app.quit", "ctrl+q", "quit", CHAT),
    Action("send", "send", "enter", "send", COMPOSER),
    Action("newline", "newline", "ctrl+j,shift+enter,alt+enter", "line break", COMPOSER),
    Action("editor", "screen.editor", "ctrl+o", "write in $EDITOR", COMPOSER),
    Action("find_prompt", "screen.find_prompt", "ctrl+f", "find an earlier prompt", COMPOSER),
    Action("older_prompt", "older_prompt", "alt+up", "the prompt before", COMPOSER),
    Action("newer_prompt", "newer_prompt", "alt+down", "the prompt after", COMPOSER),
    Action("scroll_up", "screen.scroll_page(-1)", "pageup", "scroll up", COMPOSER),
    Action("scroll_down", "screen.scroll_page(1)", "pagedown", "scroll down", COMPOSER),
    Action("scroll_end", "screen.follow", "ctrl+end", "back to the newest line", COMPOSER),
    Action("message_copy", "copy", "y", "copy the message", MESSAGES),
    Action("message_copy_code", "copy_code", "c", "copy its code, block after block", MESSAGES),
    Action("message_edit", "edit", "e", "edit, as a new version", MESSAGES),
    Action("message_branch", "branch", "b", "branch into a new tab", MESSAGES),
    Action("message_regenerate", "regenerate", "r", "regenerate, as a new version", MESSAGES),
    Action("message_older", "step_version(-1)", "left", "version before", MESSAGES),
    Action("message_newer", "step_version(1)", "right", "version after", MESSAGES),
    Action("message_fold", "fold", "enter,space", "fold or unfold the thinking", MESSAGES),
    Action("message_up", "move(-1)", "up,k", "message above", MESSAGES),
    Action("message_down", "move(1)", "down,j", "message below", MESSAGES),
    Action("engine_chat", "app.chat", "ctrl+g,escape", "back to the chat", ENGINE),
    Action("engine_cancel", "screen.cancel", "x", "cancel the followed request", ENGINE),
    Action("engine_freeze", "screen.freeze", "space", "freeze the picture", ENGINE),
    Action("engine_sort", "screen.sort", "s", "sort: slot, tokens, tok/s, blocks", ENGINE),
    Action("engine_half", "screen.half_blocks", "b", "half-block map (twice as fine, by colour)", ENGINE),
    Action("engine_group", "screen.group", "g", "next KV group", ENGINE),
    Action("engine_metrics", "screen.metrics", "m", "write the counters to a JSON file", ENGINE),
    Action("engine_up", "screen.follow_step(-1)", "up,k", "follow the row above", ENGINE),
    Action("engine_down", "screen.follow_step(1)", "down,j", "follow the row below", ENGINE),
    Action("engine_open", "screen.open_chat", "enter", "open the followed chat", ENGINE),
)
_BY_ID = {action.id: action for action in ACTIONS}

_SYMBOLS = {
    "ctrl": "⌃",
    "shift": "⇧",
    "alt": "⌥",
    "super": "⌘",
    "escape": "Esc",
    "enter": "⏎",
    "space": "space",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "up": "↑",
    "down": "↓",
    "left": "←",
    "right": "→",
    "end": "End",
    "home": "Home",
    "tab": "Tab",
}


class Keymap:
    """The keys in force: the table's, or the user's own."""

    def __init__(self, overrides: Mapping[str, object] | None = None) -> None:
        """Raises UsageError for an action that does not exist, or keys that are not text."""
        self.overrides: dict[str, str] = {}
        for name, keys in (overrides or {}).items():
            if name not in _BY_ID:
                close = difflib.get_close_matches(name, list(_BY_ID), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(_BY_ID)}"
                raise UsageError(f"keymap: there is no action {name!r}{hint}")
            if not isinstance(keys, str) or not keys.strip():
                raise UsageError(f'keymap: {name} must be keys like "ctrl+y" or "ctrl+y,f5", not {keys!r}')
            self.overrides[name] = keys

    def knows(self, action_id: str) -> bool:
        return action_id in _BY_ID

    def keys(self, action_id: str) -> str:
        return self.overrides.get(action_id, _BY_ID[action_id].keys)

    def label(self, action_id: str, *, every: bool = False) -> str:
        """How the key is shown: ⌃R. The first alternative, or all of them."""
        keys = [key_symbol(key) for key in self.keys(action_id).split(",")]
        return " ".join(keys) if every else keys[0]


def key_symbol(key: str) -> str:
    """ctrl+r -> ⌃R, f1 -> F1."""
    *modifiers, name = key.strip().split("+")
    shown = _SYMBOLS.get(name, name.upper() if modifiers or name.startswith("f") else name)
    return "".join(_SYMBOLS.get(modifier, f"{modifier}+") for modifier in modifiers) + shown


def bindings(*ids: str) -> list[BindingType]:
    """Bindings of these actions, for a BINDINGS list; their ids let the keymap change them."""
    return [_BY_ID[action_id].binding() for action_id in ids]
