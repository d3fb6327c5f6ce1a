"""Conversations on disk: what is saved is there again, whatever happened in between."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from mlxbatch.errors import UsageError
from mlxbatch.history.conversation import Conversation
from mlxbatch.history.export import to_json, to_markdown, write_export
from mlxbatch.history.records import AnswerFigures, Attachment, ChatRecord, MessageRecord
from mlxbatch.history.schema import MIGRATIONS
from mlxbatch.history.store import HistoryStore


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def store(tmp_path: Path):
    with HistoryStore(tmp_path / "history.sqlite3", clock=Clock()) as opened:
        yield opened


def reopened(store: HistoryStore) -> HistoryStore:
    store.close()
    return HistoryStore(store.path, clock=Clock())


def test_a_chat_comes_back_whole(store: HistoryStore) -> None:
    chat = store.create_chat(model="m", system_prompt="be brief", sampling={"temperature": 0.7})
    question = store.add_message(chat, None, "user", "why?", attachments=[Attachment("a.txt", "text of a")])
    answer = store.add_message(chat, question.id, "assistant", "", status="streaming", model="m")
    answer.content, answer.reasoning, answer.status = "because", "hm", "complete"
    answer.figures = AnswerFigures(prompt_tokens=9, output_tokens=3, ttft=0.25, tokens_per_second=51.5)
    answer.dropped, answer.note = 2, "the engine was restarted"
    store.save_message(answer)
    chat.title = "a title"
    store.save_chat(chat)
    store.save_draft(chat, "half a que")

    again = reopened(store)
    assert again.chat(chat.id) == chat
    assert again.messages(chat.id) == [question, answer]
    again.close()


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    HistoryStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(UsageError, match=r"newer mlxbatch.*--history FILE"):
        HistoryStore(path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not a database, and they are precious" * 20)
    with pytest.raises(UsageError, match=r"cannot use the chat history"):
        HistoryStore(path)
    assert path.read_text().startswith("these are notes")


def test_writes_go_through_a_write_ahead_log(store: HistoryStore) -> None:
    assert store._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store.path.stat().st_mode & 0o077 == 0


def test_search_finds_words_prefixes_and_accents(store: HistoryStore) -> None:
    chat = store.create_chat(title="cooking")
    first = store.add_message(chat, None, "user", "How do I make a crème brûlée?")
    second = store.add_message(chat, first.id, "assistant", "", status="streaming")
    second.content = "Whisk yolks with sugar; caramelise the sugar on top."
    store.save_message(second)

    assert [hit.message for hit in store.search("creme brul")] == [first.id]
    (hit,) = store.search("caramel")
    assert (hit.chat, hit.title, hit.role) == (chat.id, "cooking", "assistant")
    assert "\x02caramelise\x03" in hit.snippet
    assert store.search("sugar brulee") == []
    assert store.search('"unbalanced OR (') == []
    assert store.search("   ") == []


def test_search_forgets_deleted_and_replaced_text(store: HistoryStore) -> None:
    chat = store.create_chat()
    message = store.add_message(chat, None, "user", "ephemeral")
    message.content = "lasting"
    store.save_message(message)
    assert store.search("ephemeral") == []
    assert len(store.search("lasting")) == 1
    store.delete_chat(chat.id)
    assert store.search("lasting") == []
    assert store.chats() == []


def test_prompts_are_newest_first_and_each_once(store: HistoryStore) -> None:
    chat = store.create_chat()
    for text in ("one", "two", "one"):
        store.add_message(chat, None, "user", text)
    store.add_message(chat, None, "assistant", "not a prompt")
    assert store.prompts() == ["one", "two"]


def test_tabs_of_an_ended_interface_are_taken_over_once(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    first = HistoryStore(path)
    chats = [first.create_chat(title=title) for title in ("a", "b", "c")]
    for chat in chats:
        first.add_message(chat, None, "user", chat.title)
    first.save_tabs([chats[2].id, chats[0].id], active=chats[0].id)

    second = HistoryStore(path)
    assert second.restore_tabs() == ([], None)  # the first is alive
    first.close()
    tabs, active = second.restore_tabs()
    assert [chat.title for chat in tabs] == ["c", "a"]
    assert active == chats[0].id
    third = HistoryStore(path)
    assert third.restore_tabs() == ([], None)  # the second owns them now
    second.close()
    third.close()


def test_empty_chats_do_not_pile_up(store: HistoryStore) -> None:
    empty, drafted = store.create_chat(), store.create_chat()
    store.save_draft(drafted, "a thought")
    again = reopened(store)
    with pytest.raises(UsageError, match="deleted in another terminal"):
        again.chat(empty.id)
    assert again.chat(drafted.id).draft == "a thought"
    again.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from mlxbatch.history.store import HistoryStore
store = HistoryStore(Path(sys.argv[1]))
chat = store.create_chat(title="killed")
question = store.add_message(chat, None, "user", "typed and sent")
answer = store.add_message(chat, question.id, "assistant", "", status="streaming")
answer.content = "half an ans"
store.save_message(answer)
store.save_draft(chat, "next quest")
store.save_tabs([chat.id], chat.id)
print("ready", flush=True)
signal.pause()
"""


def test_kill_9_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    other = HistoryStore(path)  # a second terminal must not touch an answer that still streams
    (chat,) = other.chats()
    assert [m.status for m in other.messages(chat.id)] == ["complete", "streaming"]
    other.close()
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()

    with HistoryStore(path) as store:
        tabs, active = store.restore_tabs()
        assert [tab.draft for tab in tabs] == ["next quest"]
        assert active == tabs[0].id
        question, answer = store.messages(tabs[0].id)
        assert question.content == "typed and sent"
        assert (answer.content, answer.status) == ("half an ans", "interrupted")


def turn(number: int, parent: int | None) -> MessageRecord:
    return MessageRecord(number, 1, parent, "user" if number % 2 else "assistant", f"text {number}", 0.0)


def test_versions_stand_beside_each_other_and_remember_their_ends() -> None:
    tree = Conversation([turn(1, None), turn(2, 1), turn(3, 2), turn(4, 3), turn(5, 2), turn(6, 5)])
    assert [m.id for m in tree.path()] == [1, 2, 5, 6]
    assert tree.versions(5) == [3, 5]
    assert tree.step_version(5, -1) == 3
    assert [m.id for m in tree.path()] == [1, 2, 3, 4]
    assert tree.step_version(3, -1) is None
    tree.add(turn(8, 3))  # a second answer to 3
    assert [m.id for m in tree.path()] == [1, 2, 3, 8]
    tree.step_version(3, +1)
    tree.step_version(5, -1)
    assert tree.leaf == 8  # comes back to the answer chosen last
    assert [m.id for m in tree.path(last=3)] == [1, 2, 3]


def test_a_reopened_tree_shows_the_version_that_was_left() -> None:
    turns = [turn(1, None), turn(2, 1), turn(4, 1)]
    assert Conversation(turns, leaf=2).leaf == 2
    assert Conversation(turns, leaf=99).leaf == 4
    assert Conversation().path() == []


def test_a_branch_copies_the_path_into_its_own_chat(store: HistoryStore) -> None:
    chat = store.create_chat(model="m", system_prompt="s", sampling={"seed": 3})
    question = store.add_message(chat, None, "user", "q", attachments=[Attachment("n", "t")])
    answer = store.add_message(chat, question.id, "assistant", "a", status="streaming", model="m")
    branch = store.copy_path(chat, [question, answer], "q (branch)")
    copies = store.messages(branch.id)
    assert [(m.role, m.content, m.status) for m in copies] == [
        ("user", "q", "complete"),
        ("assistant", "a", "interrupted"),
    ]
    assert copies[1].parent == copies[0].id
    assert (branch.model, branch.system_prompt, branch.sampling) == ("m", "s", {"seed": 3})
    assert copies[0].attachments == question.attachments


def test_exports(tmp_path: Path) -> None:
    chat = ChatRecord(1, "Sums", 0.0, 0.0, system_prompt="Be exact.")
    question = MessageRecord(
        1, 1, None, "user", "Add these", 0.0, attachments=(Attachment("x.md", "```\n1+1\n```"),)
    )
    answer = MessageRecord(2, 1, 1, "assistant", "2", 0.0, status="stopped", reasoning="easy", model="tiny")
    text = to_markdown(chat, [question, answer])
    assert "# Sums" in text and "Be exact." in text and "· tiny" not in text and "## tiny · " in text
    assert "````\n```\n1+1\n```\n````" in text  # the fence is longer than any inside
    assert "<details>" in text and "*(stopped)*" in text
    assert json.loads(to_json(chat, [question, answer]))["messages"][1]["content"] == "2"

    target = tmp_path / "out.md"
    write_export(target, text)
    with pytest.raises(UsageError, match="exists already"):
        write_export(target, "other")
    assert target.read_text() == text
    with pytest.raises(UsageError, match="cannot write"):
        write_export(tmp_path / "nowhere" / "out.md", text)
