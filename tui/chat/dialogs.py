"""The dialogs of the chat screen, and what is done with their answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mlxbatch.tui.chat.commands import COMMANDS
from mlxbatch.tui.chat.pickers import (
    command_source,
    history_source,
    model_source,
    prompt_source,
    tab_source,
    theme_source,
)
from mlxbatch.tui.chat.settings_screen import SettingsScreen
from mlxbatch.tui.confirm import Confirm
from mlxbatch.tui.picker import Picker

if TYPE_CHECKING:
    from mlxbatch.tui.chat.screen import ChatScreen


class ChatDialogs:
    """Each method opens one dialog over the screen."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen

    def tabs(self) -> None:
        screen, workspace = self._screen, self._screen.workspace

        def chosen(result: tuple[str, str] | None) -> None:
            if result is None:
                return
            what, position = result
            if what == "delete":
                screen.run(screen.close_tab(workspace.sessions[int(position)]))
            else:
                screen.run(screen.select_tab(int(position)))

        source = tab_source(workspace.sessions, workspace.active_engine.snapshot)
        hint = "⏎ switch · ⌃D close tab · Esc back"
        screen.app.push_screen(
            Picker("tabs", source, hint=hint, highlighted=workspace.index, can_delete=True), chosen
        )

    def commands(self) -> None:
        screen = self._screen

        def chosen(result: tuple[str, str] | None) -> None:
            if result is None:
                return
            command = next(command for command in COMMANDS if command.name == result[1])
            if command.needs_arguments:
                screen.composer.replace_text(f"/{command.name} ")
                screen.composer.focus()
            else:
                screen.run(screen.runner.run(command, ""))

        picker = Picker("commands", command_source(screen.app.keymap), hint="⏎ run · Esc back")
        screen.app.push_screen(picker, chosen)

    def themes(self) -> None:
        """Each theme is shown while it is marked."""
        app = self._screen.app
        before = app.theme

        def preview(name: str) -> None:
            app.theme = name

        def chosen(result: tuple[str, str] | None) -> None:
            app.theme = before if result is None else result[1]

        names = list(app.available_themes)
        source = theme_source(names, before)
        place = next((index for index, item in enumerate(source("")) if item.id == before), 0)
        app.push_screen(Picker("theme", source, highlighted=place, on_highlight=preview), chosen)

    def find_prompt(self) -> None:
        screen = self._screen
        prompts = screen.workspace.store.prompts()

        def chosen(result: tuple[str, str] | None) -> None:
            if result is not None:
                screen.composer.replace_text(prompts[int(result[1])])

        source = prompt_source(prompts)
        screen.app.push_screen(Picker("earlier prompts", source, empty="no prompt matches"), chosen)

    def history(self, query: str = "") -> None:
        screen = self._screen

        def chosen(result: tuple[str, str] | None) -> None:
            if result is None:
                return
            what, found = result
            chat, _, message = found.partition(":")
            if what == "delete":
                self.confirm_delete(int(chat))
            else:
                screen.run(self.open_found(int(chat), int(message) if message else None))

        picker = Picker(
            "history",
            history_source(screen.workspace.store, screen.app.wall_clock()),
            placeholder="search every message",
            hint="⏎ open · ⌃D delete chat · Esc back",
            query=query,
            can_delete=True,
        )
        screen.app.push_screen(picker, chosen)

    async def open_found(self, chat_id: int, message_id: int | None) -> None:
        """Open a chat of the history, at a message if one was found."""
        screen = self._screen
        session = screen.workspace.open_chat(screen.workspace.store.chat(chat_id))
        if message_id is not None and message_id in session.tree and not session.streaming:
            session.tree.show(message_id)
            session.revision += 1
        await screen.show_active()
        for view in screen.transcript.views:
            if view.message.id == message_id:
                view.focus()

    def confirm_delete(self, chat_id: int) -> None:
        screen, workspace = self._screen, self._screen.workspace

        async def delete() -> None:
            session = next((s for s in workspace.sessions if s.chat.id == chat_id), None)
            if session is not None:
                await session.stop()
            workspace.forget_chat(chat_id)
            await screen.forget_widgets(chat_id)
            screen.flash("chat deleted")

        def answered(yes: bool | None) -> None:
            if yes:
                screen.run(delete())

        title = workspace.store.chat(chat_id).title or "this chat"
        screen.app.push_screen(Confirm(f"Delete “{title}” for good?"), answered)

    def settings(self) -> None:
        screen = self._screen

        def saved(changed: bool | None) -> None:
            if changed:
                screen.flash("settings saved")

        screen.app.push_screen(SettingsScreen(screen.session), saved)

    def model(self) -> None:
        screen = self._screen
        host = screen.app.host

        def chosen(result: tuple[str, str] | None) -> None:
            if result is None:
                return
            what, name = result
            if what == "choose":
                screen.switch_model(name)
            elif name in host.idle_models():
                screen.run(self._stop_engine(name))
            else:
                screen.flash("only an engine that nobody uses can be stopped here")

        source = model_source(host.model_choices(), screen.session.link.model)
        picker = Picker(
            "model of this chat",
            source,
            placeholder="name, Hugging Face repo or path",
            hint="⏎ choose · ⌃D stop its idle engine · Esc back",
            can_delete=True,
        )
        screen.app.push_screen(picker, chosen)

    async def _stop_engine(self, model: str) -> None:
        await asyncio.to_thread(self._screen.app.host.stop, model)
        self._screen.flash(f"the engine of {model} was stopped")
