"""What a user keeps, finds and sets: history, drafts, settings, files, models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from scenes import ANSWER, QUESTION, earlier_chats, scripted
from scripted_engine import ScriptedEngine
from stage import Stage, on_stage, run
from textual.widgets import Input

from mlxbatch.errors import ModelError
from mlxbatch.history.store import HistoryStore
from mlxbatch.tui.chat.message_view import MessageView
from mlxbatch.tui.engine.screen import EngineScreen
from mlxbatch.tui.keymap import Keymap


def contents(stage: Stage) -> list[str]:
    return [turn.content for turn in stage.workspace.active.tree.path()]


def reopened(folder: Path) -> HistoryStore:
    return HistoryStore(folder / "history.sqlite3")


def test_drafts_and_tabs_are_there_after_a_restart(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            await stage.say("Why so?")
            await stage.play(4)
            await stage.press("ctrl+n")
            await stage.type("half a thought")
        async with on_stage(tmp_path, scripted()) as stage:
            assert [session.title for session in stage.workspace.sessions] == ["Why so?", "new chat"]
            assert stage.app.chat_screen.composer.text == "half a thought"
            await stage.press("ctrl+pageup")
            assert "■ interrupted" in stage.text()
            assert contents(stage)[1].startswith("Each sequence")

    run(scene())


def test_a_sent_message_is_no_draft_any_more(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            await stage.type("send me")
            await stage.pilot.press("enter", "ctrl+n")
            await stage.settle()
            assert [session.chat.draft for session in stage.workspace.sessions] == ["", ""]

    run(scene())


def test_each_second_of_streaming_is_saved(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            await stage.say("Why so?")
            await stage.play(6)
            stage.workspace.autosave()
            with reopened(tmp_path) as other:  # as after a kill: read by somebody else
                (chat,) = other.chats()
                assert other.messages(chat.id)[1].content == contents(stage)[1] != ""
                assert other.messages(chat.id)[1].status == "streaming"

    run(scene())


def test_prompt_history(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            composer = stage.app.chat_screen.composer
            await stage.type("typed")
            await stage.press("alt+up")
            assert composer.text == QUESTION
            await stage.press("alt+up")
            assert composer.text == "What does fork copy?"
            await stage.press("alt+down", "alt+down")
            assert composer.text == "typed"
            await stage.press("ctrl+f")
            await stage.press(*"flag", "enter")
            assert composer.text == "Which flag resumes a run?"

    run(scene())


def test_search_opens_the_message(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            await stage.press("ctrl+s")
            await stage.press(*"perfetto", "enter")
            assert stage.workspace.active.title == "Reading a Chrome trace"
            focused = stage.app.focused
            assert isinstance(focused, MessageView)
            assert focused.message.content == "How do I open a trace in Perfetto?"
            assert len(stage.workspace.sessions) == 2

    run(scene())


def test_search_finds_a_hidden_version_and_shows_it(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            await stage.press("ctrl+s")
            await stage.press(*"does not need any", "enter")
            assert contents(stage)[-1] == "It does not need any."
            assert "‹ 3/3 ›" in stage.text()

    run(scene())


def test_chats_are_deleted_only_on_yes(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            await stage.say("/delete")
            assert "for good?" in stage.text()
            await stage.press("n")
            assert stage.workspace.active.title == "paged attention"
            await stage.say("/delete")
            await stage.press("y")
            assert stage.workspace.active.title == "new chat"
            assert "paged attention" not in [chat.title for chat in stage.workspace.store.chats()]

    run(scene())


def test_settings_reach_the_engine_and_the_history(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            await stage.say("/set temperature 0.2")
            await stage.say("/system Answer in French.")
            await stage.press("f2")
            stage.app.screen.query_one("#max_tokens", Input).value = "7"
            stage.app.screen.query_one("#temperature", Input).value = "9e999"
            await stage.press("tab", "enter")
            assert "✗ temperature must be" in stage.text()  # nothing is saved while something is wrong
            stage.app.screen.query_one("#temperature", Input).value = ""
            await stage.press("enter")
            await stage.say("hello")
            submit = stage.engine.submitted[0]
            assert submit.params == {"max_tokens": 7, "temperature": 0.7, "top_p": 0.95}
            assert submit.messages == [
                {"role": "system", "content": "Answer in French."},
                {"role": "user", "content": "hello"},
            ]
            await stage.play(12)
            assert "cut at max_tokens" in stage.text()
        with reopened(tmp_path) as store:
            chat = store.chat(store.chats()[0].id)
            assert (chat.system_prompt, chat.sampling) == ("Answer in French.", {"max_tokens": 7})

    run(scene())


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("/nonsense", "there is no command /nonsense"),
        ("/xyzzy", "/help lists the commands"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set top_k much", "top_k must be a whole number"),
        ("/file missing.txt", "cannot read missing.txt"),
        ("/export pdf", "write /export md or /export json"),
        ("/theme plaid", "there is no theme 'plaid'"),
        ("/branch", "there is nothing to branch from yet"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, typed: str, shown: str) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            errors = []
            stage.app.chat_screen.complain = lambda error: errors.append(str(error))  # type: ignore[method-assign]
            await stage.type(typed)
            stage.app.chat_screen.command_list.close()
            await stage.press("enter")
            assert len(errors) == 1
            assert shown in errors[0]
            assert not stage.engine.submitted

    run(scene())


def test_files_go_into_the_prompt(tmp_path: Path) -> None:
    notes = tmp_path / "my notes.md"
    notes.write_text("Blocks hold 16 tokens.\n")

    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            await stage.say(f'/file "{notes}"')
            assert "message + my notes.md (23 B)" in stage.text()
            await stage.say("Summarise.")
            (message,) = stage.engine.submitted[0].messages
            assert message["content"] == "File my notes.md:\n```\nBlocks hold 16 tokens.\n```\n\nSummarise."
            assert "▤ my notes.md" in stage.text()
            await stage.play(2)
            assert "message + my notes.md" not in stage.text()  # it went with that message only

    run(scene())


def test_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            await stage.say("/export md")
            await stage.say("/export json all.json")
            assert "written to all.json" in stage.text()

    run(scene())
    assert ANSWER.splitlines()[0] in (tmp_path / "paged-attention.md").read_text()
    assert len(json.loads((tmp_path / "all.json").read_text())["messages"]) == 4


def test_the_keymap_of_the_user_holds(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, keymap=Keymap({"engine": "f5", "new": "f6"})) as stage:
            assert "F5 engine" in stage.text()
            await stage.press("ctrl+g")
            assert not isinstance(stage.app.screen, EngineScreen)
            await stage.press("f5")
            assert isinstance(stage.app.screen, EngineScreen)

    run(scene())


def test_tab_switcher_closes_and_switches(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            for name in ("alpha", "beta", "gamma"):
                await stage.say(name)
                await stage.press("ctrl+n")
            await stage.press("ctrl+t")
            await stage.press(*"alpha", "ctrl+d")
            assert [session.title for session in stage.workspace.sessions] == ["beta", "gamma", "new chat"]
            await stage.press("ctrl+t")
            await stage.press(*"gam", "enter")
            assert stage.workspace.active.title == "gamma"
            await stage.press("ctrl+t", "escape")
            assert "alpha" in [chat.title for chat in stage.workspace.store.chats()]

    run(scene())


class Host:
    """A machine on which one idle engine holds the memory."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def model_choices(self) -> list[tuple[str, str]]:
        return [("Qwen3-4B-4bit", "loaded"), ("old", "idle"), ("tiny", "for a look")]

    def idle_models(self) -> dict[str, str]:
        return {} if self.stopped else {"old": "9 GB"}

    def stop(self, model: str) -> None:
        self.stopped.append(model)


def test_the_model_of_a_chat_can_be_changed(tmp_path: Path) -> None:
    async def scene() -> None:
        links = {name: ScriptedEngine(model=name) for name in ("Qwen3-4B-4bit", "tiny", "org/some-repo")}
        async with on_stage(tmp_path, links["Qwen3-4B-4bit"], host=Host(), links=links.__getitem__) as stage:
            await stage.press("ctrl+l")
            await stage.press(*"tin", "enter")
            assert set(stage.workspace.engines) == {"tiny"}  # the other is left, so that it can become idle
            await stage.say("hello")
            assert len(links["tiny"].submitted) == 1
            links["tiny"].play(2)
            await stage.press("ctrl+n")
            await stage.press("ctrl+l")
            await stage.press(*"org/some-repo", "enter")
            assert set(stage.workspace.engines) == {"tiny", "org/some-repo"}
            assert "some-repo" in stage.line(0)

    run(scene())


def test_room_for_a_model_is_made_by_stopping_an_idle_engine(tmp_path: Path) -> None:
    async def scene() -> None:
        host, big = Host(), ScriptedEngine(model="big")
        links = {"Qwen3-4B-4bit": ScriptedEngine(), "big": big}
        ready = big.start

        async def start() -> None:
            if not host.stopped:
                raise ModelError(
                    "big needs 20 GB and 12 GB are left.\nOther engines hold memory:\n  old holds 9 GB (idle)"
                )
            await ready()

        big.start = start  # type: ignore[method-assign]
        async with on_stage(tmp_path, links["Qwen3-4B-4bit"], host=host, links=links.__getitem__) as stage:
            await stage.say("/model big")
            assert "big needs 20 GB and 12 GB are left." in stage.text()
            assert "Stop it and try again?" in stage.text()
            await stage.press("y")
            await asyncio.to_thread(lambda: None)
            await stage.settle()
            assert host.stopped == ["old"]
            assert stage.workspace.active_engine.status.state == "ready"

    run(scene())


def test_an_idle_engine_is_stopped_from_the_list_of_models(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host()
        async with on_stage(tmp_path, host=host) as stage:
            await stage.press("ctrl+l")
            await stage.press(*"tiny", "ctrl+d")
            assert "only an engine that nobody uses" in stage.text()
            await stage.press("ctrl+l")
            await stage.press(*"old", "ctrl+d")
            await asyncio.to_thread(lambda: None)
            await stage.settle()
            assert host.stopped == ["old"]
            assert stage.workspace.active.link.model == "Qwen3-4B-4bit"

    run(scene())


def test_long_chats_mount_their_newest_turns_first(tmp_path: Path) -> None:
    def long_chat(store: HistoryStore) -> None:
        chat = store.create_chat(title="long")
        parent = None
        for number in range(100):
            role = "user" if number % 2 == 0 else "assistant"
            parent = store.add_message(chat, parent, role, f"turn {number}").id
        store.save_tabs([chat.id], chat.id)

    async def scene() -> None:
        async with on_stage(tmp_path, prepare=long_chat) as stage:
            assert len(stage.app.chat_screen.transcript.views) == 40
            assert "turn 99" in stage.text()
            for _ in range(40):
                await stage.pilot.press("pageup")
                if len(stage.app.chat_screen.transcript.views) > 40:
                    break
            await stage.settle()
            assert len(stage.app.chat_screen.transcript.views) == 80
            assert "more below" in stage.text()
            assert "turn 60" in stage.text()  # what was at the top before older turns came
            await stage.press("ctrl+end")
            assert "turn 99" in stage.text()
            assert "more below" not in stage.text()

    run(scene())
