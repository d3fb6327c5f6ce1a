"""What the pickers of the chat list: tabs, earlier prompts, the history, models."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.history.store import HistoryStore
from mlxbatch.tui.chat.commands import COMMANDS
from mlxbatch.tui.chat.message_header import moment
from mlxbatch.tui.chat.session import ChatSession
from mlxbatch.tui.chat.tab_bar import STATE_MARKS, STATE_WORDS
from mlxbatch.tui.drawing import clip, printable
from mlxbatch.tui.keymap import Keymap
from mlxbatch.tui.picker import PickerItem, Source, filtered

_DIM = "$text-muted"
PROMPT_LINES = 3


def tab_source(sessions: Sequence[ChatSession], snapshot: Snapshot | None) -> Source:
    """Ids are positions."""
    items = []
    for index, session in enumerate(sessions):
        state = session.state(snapshot)
        turns = len(session.tree.path())
        content = Content.assemble(
            f"{index + 1:>2} {STATE_MARKS[state][0] or ' '} {clip(printable(session.title), 40)}",
            (f" {STATE_WORDS[state]:<18} {turns:>4} turns", _DIM),
        )
        items.append((str(index), content))
    return filtered(items)


def prompt_source(prompts: Sequence[str]) -> Source:
    """Ids are positions in `prompts`."""
    items = []
    for index, prompt in enumerate(prompts):
        lines = [line for line in printable(prompt).splitlines() if line.strip()]
        text = "\n".join(clip(line, 90).rstrip() for line in lines[:PROMPT_LINES])
        more = f"\n… {len(lines) - PROMPT_LINES} more lines" if len(lines) > PROMPT_LINES else ""
        items.append((str(index), Content.assemble(text, (more, _DIM))))
    return filtered(items)


def history_source(store: HistoryStore, now: float) -> Source:
    """All chats, newest first; with words typed, the messages that hold them. Ids are "chat" or "chat:message"."""

    def source(query: str) -> list[PickerItem]:
        if query.strip():
            return [
                _hit(hit.chat, hit.message, hit.title, hit.role, hit.created, hit.snippet, now)
                for hit in store.search(query)
            ]
        return [
            PickerItem(
                str(chat.id),
                Content.assemble(
                    clip(printable(chat.title or "untitled"), 48),
                    (f" {chat.turns:>4} turns  {moment(chat.updated, now)}", _DIM),
                ),
            )
            for chat in store.chats()
        ]

    return source


def _hit(chat: int, message: int, title: str, role: str, created: float, snippet: str, now: float) -> PickerItem:
    head = Content.assemble(
        clip(printable(title or "untitled"), 48),
        (f" {'you' if role == 'user' else 'answer':<6}", _DIM),
        (f"  {moment(created, now)}", _DIM),
    )
    return PickerItem(f"{chat}:{message}", Content("\n").join([head, _snippet(snippet)]))


def _snippet(text: str) -> Content:
    """One line, the matches in bold and between marks, so that they show without colour too."""
    parts: list[str | tuple[str, str]] = [("   ", _DIM)]
    flat = " ".join(text.split())
    for index, piece in enumerate(flat.replace("\x03", "\x02").split("\x02")):
        parts.append((printable(piece), "bold underline" if index % 2 else _DIM))
    return Content.assemble(*parts)


def command_source(keymap: Keymap) -> Source:
    """Every command with its key, if it has one. Ids are names."""
    items = []
    for command in COMMANDS:
        key = keymap.label(command.action) if command.action else ""
        name = f"/{command.name} {command.usage}".rstrip()
        items.append((command.name, Content.assemble(clip(name, 24), (f"{clip(command.help, 47)} {key:>5}", _DIM))))
    return filtered(items)


def theme_source(names: Sequence[str], current: str) -> Source:
    ours = [name for name in names if name.startswith("mlxbatch")]
    rest = sorted(name for name in names if name not in ours)
    marked = [(name, Content(f"{'●' if name == current else ' '} {name}")) for name in [*ours, *rest]]
    return filtered(marked)


def model_source(choices: Sequence[tuple[str, str]], current: str) -> Source:
    """`choices` are (name, description); anything else that is typed is offered as it stands."""
    items = [
        (
            name,
            Content.assemble(f"{'●' if name == current else ' '} {clip(name, 40)}", (f" {description}", _DIM)),
        )
        for name, description in choices
    ]
    known = filtered(items)

    def source(query: str) -> list[PickerItem]:
        found = list(known(query))
        name = query.strip()
        if name and name not in dict(choices):
            found.append(PickerItem(name, Content.assemble(f"  {name}", (" as typed", _DIM))))
        return found

    return source
