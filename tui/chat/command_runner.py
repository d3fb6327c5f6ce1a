"""Carries out the slash commands."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from mlxbatch.errors import UsageError
from mlxbatch.history.export import to_json, to_markdown, write_export
from mlxbatch.tui.chat.attachments import read_attachment, split_names
from mlxbatch.tui.chat.commands import Command, read_parameter
from mlxbatch.tui.numbers import size

if TYPE_CHECKING:
    from mlxbatch.tui.chat.screen import ChatScreen


class CommandRunner:
    """A command's method is one of the screen's actions, without arguments, or a method here."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen

    async def run(self, command: Command, arguments: str) -> None:
        """Raises UsageError and RequestError for the user to see."""
        if command.method.startswith("action_"):
            result = getattr(self._screen, command.method)()
        else:
            result = getattr(self, command.method)(arguments)
        if inspect.isawaitable(result):
            await result

    async def command_close(self, arguments: str) -> None:
        await self._screen.close_tab(self._screen.session)

    def command_rename(self, arguments: str) -> None:
        self._screen.session.set_title(arguments)

    def command_system(self, arguments: str) -> None:
        if not arguments:
            self._screen.action_settings()
            return
        self._screen.session.set_system_prompt(arguments)
        self._screen.flash("system prompt set")

    def command_set(self, arguments: str) -> None:
        name, _, value = arguments.replace("=", " ", 1).partition(" ")
        self._screen.session.set_sampling({name: read_parameter(name, value)})
        self._screen.flash(f"{name} set" if value.strip() else f"{name} is back at its default")

    def command_model(self, arguments: str) -> None:
        if arguments:
            self._screen.switch_model(arguments)
        else:
            self._screen.action_model()

    def command_file(self, arguments: str) -> None:
        for name in split_names(arguments):
            attachment = read_attachment(name)
            self._screen.session.attach(attachment)
            self._screen.flash(f"{attachment.name} ({size(len(attachment.text.encode()))}) goes with the message")

    def command_edit(self, arguments: str) -> None:
        own = [turn for turn in self._screen.session.tree.path() if turn.role == "user"]
        if not own:
            raise UsageError("there is no message of yours to edit yet")
        self._screen.edit_message(own[-1].id)

    def command_branch(self, arguments: str) -> None:
        leaf = self._screen.session.tree.leaf
        if leaf is None:
            raise UsageError("there is nothing to branch from yet")
        self._screen.branch_from(leaf)

    def command_copy(self, arguments: str) -> None:
        answers = [view for view in self._screen.transcript.views if view.message.role == "assistant"]
        if not answers:
            raise UsageError("there is no answer to copy yet")
        if arguments != "code":
            self._screen.copy(answers[-1].message.content)
            return
        blocks = [code for view in answers if view.body for code in view.body.code_blocks()]
        if not blocks:
            raise UsageError("there is no code block in these answers")
        self._screen.copy(blocks[-1])

    def command_search(self, arguments: str) -> None:
        self._screen.dialogs.history(arguments)

    def command_export(self, arguments: str) -> None:
        kind, _, name = arguments.partition(" ")
        session = self._screen.session
        if kind == "md":
            text = to_markdown(session.chat, session.tree.path())
        elif kind == "json":
            text = to_json(session.chat, session.store.messages(session.chat.id))
        else:
            raise UsageError("write /export md or /export json, and a file name if you like")
        target = Path(name.strip() or f"{_file_name(session.title)}.{kind}").expanduser()
        write_export(target, text)
        self._screen.flash(f"written to {target}")

    def command_delete(self, arguments: str) -> None:
        self._screen.dialogs.confirm_delete(self._screen.session.chat.id)

    def command_theme(self, arguments: str) -> None:
        app = self._screen.app
        if not arguments:
            self._screen.dialogs.themes()
        elif arguments in app.available_themes:
            app.theme = arguments
        else:
            raise UsageError(f"there is no theme {arguments!r}; there are: {', '.join(sorted(app.available_themes))}")

    def command_engine(self, arguments: str) -> None:
        self._screen.app.action_engine()

    def command_help(self, arguments: str) -> None:
        self._screen.app.action_help()

    def command_quit(self, arguments: str) -> None:
        self._screen.app.exit()


def _file_name(title: str) -> str:
    """A title as a plain file name."""
    kept = "".join(character if character.isalnum() else "-" for character in title.lower())
    return "-".join(part for part in kept.split("-") if part)[:60] or "chat"
