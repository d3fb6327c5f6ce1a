"""What a user does in the chat, against a scripted engine."""

from __future__ import annotations

from pathlib import Path

from scenes import ANSWER, FORK_ANSWER, QUESTION, earlier_chats, scripted
from scripted_engine import ScriptedEngine
from stage import Stage, on_stage, run

from mlxbatch.history.store import HistoryStore
from mlxbatch.process.status import LinkStatus


def contents(stage: Stage) -> list[str]:
    return [turn.content for turn in stage.workspace.active.tree.path()]


def reopened(folder: Path) -> HistoryStore:
    return HistoryStore(folder / "history.sqlite3")


def test_three_tabs_answer_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(script={name: [f"{name}{n} " for n in range(40)] for name in ("a", "b", "c")})
        async with on_stage(tmp_path, engine) as stage:
            for name in ("a", "b", "c"):
                await stage.say(name)
                await stage.press("ctrl+n")
            await stage.play(10)
            assert [len(slot.label) for slot in engine.snapshot().slots] == [1, 1, 1]
            assert stage.line(0).count("●") == 3
            for index, name in enumerate("abc"):
                await stage.app.chat_screen.select_tab(index)
                await stage.settle()
                assert f"{name}8" in stage.text()
                assert f"{name}30" not in stage.text()
            await stage.play(40)
            assert all(session.answer is None for session in stage.workspace.sessions)
            assert stage.line(0).count("✓") == 2  # the one on show has been seen

    run(scene())


def test_stop_keeps_what_there_is(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            await stage.say("go on")
            await stage.play(12)
            await stage.press("escape")
            await stage.settle()
            answer = stage.workspace.active.tree.path()[-1]
            assert answer.status == "stopped"
            assert answer.content.startswith("word0 word1 ")
            assert "■ stopped" in stage.text()
            assert not stage.engine.running
            await stage.say("and again")  # the tab is free for the next message
            assert len(stage.engine.queue) + len(stage.engine.running) == 1
        with reopened(tmp_path) as store:
            (chat,) = store.chats()
            assert [m.status for m in store.messages(chat.id)] == ["complete", "stopped", "complete", "interrupted"]

    run(scene())


def test_regenerate_adds_a_version_and_keeps_the_old(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), prepare=earlier_chats) as stage:
            assert "‹ 2/3 ›" in stage.text()
            await stage.press("ctrl+r")
            await stage.play(3)
            assert "‹ 4/4 ›" in stage.text()
            await stage.press("ctrl+r")  # while it streams: the answer is stopped, another begins
            await stage.play(150)
            assert "‹ 5/5 ›" in stage.text()
            path = stage.workspace.active.tree.path()
            assert path[-1].content == ANSWER
            versions = [stage.workspace.active.tree[v] for v in stage.workspace.active.tree.versions(path[-1].id)]
            assert versions[0].content == "Because of block tables."
            assert versions[3].status == "stopped"
            await stage.press("up", "left", "left")
            assert "‹ 3/5 ›" in stage.text()
            assert "It does not need any." in stage.text()
            await stage.press("right")
            assert "‹ 4/5 ›" in stage.text()

    run(scene())


def test_edit_makes_a_version_of_the_question(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), prepare=earlier_chats) as stage:
            await stage.type("half a thought")
            await stage.press("up", "up", "e")
            assert stage.app.chat_screen.composer.text == QUESTION
            assert "edit message" in stage.text()
            await stage.press("escape")
            assert "edit message" not in stage.text()
            assert stage.app.chat_screen.composer.text == "half a thought"
            await stage.press("up", "up", "e")
            await stage.type(" Be brief.")
            await stage.press("enter")
            await stage.play(2)
            assert contents(stage)[0] == QUESTION + " Be brief."
            assert stage.app.chat_screen.composer.text == "half a thought"
            assert "‹ 2/2 ›" in stage.text()
            first = stage.workspace.active.tree.path()[0]
            assert stage.workspace.active.tree.versions(first.id)[0] != first.id

    run(scene())


def test_branch_opens_a_tab_with_the_turns_so_far(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), prepare=earlier_chats) as stage:
            await stage.press("up", "b")
            assert len(stage.workspace.sessions) == 2
            assert stage.workspace.active.title == "paged attention (branch)"
            assert contents(stage) == [QUESTION, ANSWER]
            await stage.say("And what happens on a fork?")
            await stage.play(2)
            await stage.press("ctrl+pageup")
            assert contents(stage) == [QUESTION, ANSWER]

    run(scene())


def test_copy_a_message_and_its_code(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            await stage.press("up", "y")
            assert stage.app.clipboard == ANSWER
            assert f"copied {len(ANSWER):,} characters" in stage.text()
            await stage.press("c")
            assert stage.app.clipboard.startswith("def slot(pos, table, bs=16):")
            await stage.press("escape")
            await stage.say("/copy")
            assert stage.app.clipboard == ANSWER
            await stage.pilot.click(".fence-copy")
            assert stage.app.clipboard.startswith("def slot")

    run(scene())


def test_several_lines_are_typed_and_pasted_without_sending(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            await stage.press("a", "ctrl+j", "b")
            assert stage.app.chat_screen.composer.text == "a\nb"
            await stage.type("\n/c\nd")
            await stage.press("enter")
            assert contents(stage)[0] == "a\nb\n/c\nd"
            assert stage.app.chat_screen.composer.text == ""

    run(scene())


def test_context_full_drops_the_oldest_turns_visibly(tmp_path: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(context=120, script={"q": ["ok "] * 3})
        async with on_stage(tmp_path, engine, system_prompt="stay") as stage:
            for number in range(6):
                await stage.say(f"q{number} " + "w " * 10)
                await stage.play(6)
            messages = engine.submitted[-1].messages
            assert messages[0] == {"role": "system", "content": "stay"}
            assert messages[1]["content"].startswith("q")
            assert messages[1]["content"][:2] != "q0"
            assert messages[-1]["content"].startswith("q5")
            assert "context full: the" in stage.text()
            dropped = [turn.dropped for turn in stage.workspace.active.tree.path() if turn.role == "assistant"]
            assert dropped[0] == 0
            assert dropped == sorted(dropped)
            assert len(set(dropped)) < 4  # one cut serves several turns, so that the cached prefix stays

    run(scene())


def test_a_message_that_can_never_fit_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, ScriptedEngine(context=50)) as stage:
            await stage.say("w " * 80)
            assert "✗ failed" in stage.text()
            assert "and the model's context" in stage.text()
            assert not stage.engine.submitted

    run(scene())


def test_a_restarted_engine_leaves_a_note_and_the_text_goes_on(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            await stage.say("Why so?")
            await stage.play(10)
            stage.engine.tell(LinkStatus("restarting", "the engine died; it is started again"))
            await stage.settle()
            assert "the engine died; it is started again" in stage.text()
            stage.engine.tell(LinkStatus("ready"))
            await stage.play(150)
            assert "the engine was restarted" in stage.text()
            assert contents(stage)[1] == ANSWER

    run(scene())


def test_control_characters_of_an_answer_do_not_reach_the_terminal(tmp_path: Path) -> None:
    async def scene() -> None:
        engine = ScriptedEngine(script={"evil": ["\x1b]0;owned\x07 ", "\x9b31m ", "<b>kept</b> ", "`\x1b[2J`"]})
        async with on_stage(tmp_path, engine) as stage:
            await stage.say("evil \x1b[31m prompt")
            await stage.play(8)
            text = stage.text()
            assert "\x1b" not in text and "\x07" not in text and "\x9b" not in text
            assert "␛]0;owned␇" in text
            assert "<b>kept</b>" in text

    run(scene())


def test_streamed_markdown_equals_markdown_given_at_once(tmp_path: Path) -> None:
    text = FORK_ANSWER.partition("</think>\n\n")[2] + "\n\n" + ANSWER

    async def scene() -> None:
        engine = ScriptedEngine(script={"q": [text[n : n + 3] for n in range(0, len(text), 3)]})
        async with on_stage(tmp_path, engine, size=(99, 80)) as stage:
            await stage.say("q")
            while stage.workspace.streaming:
                await stage.play(9)
            streamed = stage.text().splitlines()[3:70]
        async with on_stage(tmp_path, engine, size=(99, 80)) as stage:
            assert stage.text().splitlines()[3:70] == streamed
        assert any("┃ def slot" in line for line in streamed)
        assert any("copied" in line for line in streamed)

    run(scene())


def test_switching_tabs_while_they_stream_neither_loses_nor_doubles_text(tmp_path: Path) -> None:
    async def scene() -> None:
        script = {name: [f"{name}{n:02d} " for n in range(40)] for name in ("a", "b", "c")}
        async with on_stage(tmp_path, ScriptedEngine(script=script)) as stage:
            screen = stage.app.chat_screen
            for name in ("a", "b", "c"):
                screen.send(name)
                await screen.action_new_tab()
            for number in range(60):  # no time to settle in between
                stage.engine.step()
                await screen.select_tab(number % 3)
                await stage.app.tick()
            await stage.settle()
            for index, name in enumerate("abc"):
                await screen.select_tab(index)
                await stage.settle()
                body = stage.app.chat_screen.transcript.views[-1].body
                assert body is not None
                assert body.source == "".join(script[name])
                assert stage.text().count(f"{name}17") == 1

    run(scene())
