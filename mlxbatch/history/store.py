"""Reads and writes the history file."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import platformdirs

from mlxbatch.errors import UsageError
from mlxbatch.history.records import (
    AnswerFigures,
    Attachment,
    ChatRecord,
    ChatSummary,
    MessageRecord,
    Role,
    SearchHit,
    Status,
)
from mlxbatch.history.schema import migrate
from mlxbatch.history.window import Window

_CHAT = "id, title, created, updated, model, system_prompt, sampling, draft, leaf"
_MESSAGE = "id, chat, parent, role, content, created, status, reasoning, attachments, model, dropped, note, figures"


def default_history_path() -> Path:
    return platformdirs.user_data_path("mlxbatch") / "history.sqlite3"


class HistoryStore:
    """One connection to the history file, which several terminals may have open at once.

    Write-ahead logging with synchronous=NORMAL: a commit survives a kill of the process (only a power cut
    can take the last commits), and costs well under a millisecond, so every keystroke can be saved.
    Raises UsageError when the file cannot be opened or is not a history file.
    """

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path or default_history_path()
        self._clock = clock
        self._closed = False
        self.saved_at: float | None = None  # when something was last written, on the clock
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            migrate(self._db, str(self.path))
            self.path.chmod(0o600)
            self.window = Window(self.path.parent / "windows")
        except (sqlite3.Error, OSError) as error:
            raise UsageError(
                f"cannot use the chat history {self.path}: {error}. Move the file away, or choose another "
                "with --history FILE."
            ) from None
        self._mark_interrupted()

    def __enter__(self) -> HistoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove chats of this window in which nothing was said, and let go of the file. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._db.execute(
            "DELETE FROM chat WHERE window = ? AND draft = '' "
            "AND NOT EXISTS (SELECT 1 FROM message WHERE message.chat = chat.id)",
            (self.window.id,),
        )
        self._db.close()
        self.window.close()

    # Chats

    def create_chat(
        self,
        *,
        model: str = "",
        system_prompt: str = "",
        sampling: dict[str, object] | None = None,
        title: str = "",
    ) -> ChatRecord:
        now = self._clock()
        cursor = self._db.execute(
            "INSERT INTO chat (title, created, updated, model, system_prompt, sampling, window) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (title, now, now, model, system_prompt, json.dumps(sampling or {}), self.window.id),
        )
        return self.chat(_row_id(cursor))

    def chat(self, chat_id: int) -> ChatRecord:
        row = self._db.execute(f"SELECT {_CHAT} FROM chat WHERE id = ?", (chat_id,)).fetchone()
        if row is None:
            raise UsageError(f"chat {chat_id} is not in {self.path}; it may have been deleted in another terminal")
        return _chat(row)

    def save_chat(self, chat: ChatRecord) -> None:
        """Write title, model, system prompt, sampling and leaf."""
        chat.updated = self.saved_at = self._clock()
        self._db.execute(
            "UPDATE chat SET title = ?, updated = ?, model = ?, system_prompt = ?, sampling = ?, leaf = ? "
            "WHERE id = ?",
            (
                chat.title,
                chat.updated,
                chat.model,
                chat.system_prompt,
                json.dumps(chat.sampling),
                chat.leaf,
                chat.id,
            ),
        )

    def save_draft(self, chat: ChatRecord, draft: str) -> None:
        """What is typed but not sent."""
        chat.draft = draft
        self._db.execute("UPDATE chat SET draft = ? WHERE id = ?", (draft, chat.id))

    def delete_chat(self, chat_id: int) -> None:
        self._db.execute("DELETE FROM chat WHERE id = ?", (chat_id,))

    def chats(self, limit: int = 200) -> list[ChatSummary]:
        """Chats that hold at least one turn, newest first."""
        rows = self._db.execute(
            "SELECT chat.id, title, updated, count(message.id) "
            "FROM chat JOIN message ON message.chat = chat.id "
            "GROUP BY chat.id ORDER BY updated DESC, chat.id DESC LIMIT ?",
            (limit,),
        )
        return [ChatSummary(*row) for row in rows]

    # Turns

    def messages(self, chat_id: int) -> list[MessageRecord]:
        rows = self._db.execute(f"SELECT {_MESSAGE} FROM message WHERE chat = ? ORDER BY id", (chat_id,))
        return [_message(row) for row in rows]

    def add_message(
        self,
        chat: ChatRecord,
        parent: int | None,
        role: Role,
        content: str,
        *,
        status: Status = "complete",
        attachments: Iterable[Attachment] = (),
        model: str = "",
    ) -> MessageRecord:
        """Add a turn and make it the leaf of its chat, in one transaction."""
        now = self._clock()
        attachments = tuple(attachments)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            cursor = self._db.execute(
                "INSERT INTO message "
                "(chat, parent, role, content, created, status, attachments, model, window) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    chat.id,
                    parent,
                    role,
                    content,
                    now,
                    status,
                    json.dumps([asdict(a) for a in attachments]),
                    model,
                    self.window.id,
                ),
            )
            message = MessageRecord(
                _row_id(cursor),
                chat.id,
                parent,
                role,
                content,
                now,
                status,
                attachments=attachments,
                model=model,
            )
            self._db.execute("UPDATE chat SET leaf = ?, updated = ? WHERE id = ?", (message.id, now, chat.id))
        chat.leaf = message.id
        chat.updated = self.saved_at = now
        return message

    def save_message(self, message: MessageRecord) -> None:
        """Write what changes while an answer streams, and when it ends."""
        self.saved_at = self._clock()
        self._db.execute(
            "UPDATE message SET content = ?, reasoning = ?, status = ?, dropped = ?, note = ?, figures = ?, "
            "model = ? WHERE id = ?",
            (
                message.content,
                message.reasoning,
                message.status,
                message.dropped,
                message.note,
                json.dumps(asdict(message.figures)),
                message.model,
                message.id,
            ),
        )

    def copy_path(self, source: ChatRecord, path: Iterable[MessageRecord], title: str) -> ChatRecord:
        """A new chat that starts with copies of these turns (a branch)."""
        chat = self.create_chat(
            model=source.model, system_prompt=source.system_prompt, sampling=source.sampling, title=title
        )
        parent: int | None = None
        for original in path:
            status: Status = "interrupted" if original.status == "streaming" else original.status
            copy = self.add_message(
                chat,
                parent,
                original.role,
                original.content,
                status=status,
                attachments=original.attachments,
                model=original.model,
            )
            copy.reasoning, copy.dropped, copy.note = original.reasoning, original.dropped, original.note
            copy.figures = original.figures
            self.save_message(copy)
            parent = copy.id
        return chat

    # Search

    def search(self, text: str, limit: int = 100) -> list[SearchHit]:
        """Turns that hold every word of `text`; the last word may be unfinished. Best match first."""
        words = text.replace('"', " ").split()
        if not words:
            return []
        query = " ".join(f'"{word}"' for word in words) + "*"
        rows = self._db.execute(
            "SELECT message.chat, chat.title, message.id, role, message.created, "
            "snippet(message_text, 0, char(2), char(3), '…', 12) "
            "FROM message_text JOIN message ON message.id = message_text.rowid "
            "JOIN chat ON chat.id = message.chat "
            "WHERE message_text MATCH ? ORDER BY rank, message.id DESC LIMIT ?",
            (query, limit),
        )
        return [SearchHit(*row) for row in rows]

    def prompts(self, limit: int = 500) -> list[str]:
        """Prompts sent from any chat, newest first, each once."""
        rows = self._db.execute(
            "SELECT content FROM message WHERE role = 'user' AND content <> '' "
            "GROUP BY content ORDER BY max(id) DESC LIMIT ?",
            (limit,),
        )
        return [content for (content,) in rows]

    # Tabs

    def save_tabs(self, chat_ids: Iterable[int], active: int | None) -> None:
        """Remember which chats are open here, in order; `active` is the one on show."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("UPDATE chat SET window = NULL WHERE window = ?", (self.window.id,))
            for position, chat_id in enumerate(chat_ids):
                self._db.execute(
                    "UPDATE chat SET window = ?, position = ? WHERE id = ?",
                    (self.window.id, -1 - position if chat_id == active else position, chat_id),
                )

    def restore_tabs(self) -> tuple[list[ChatRecord], int | None]:
        """Take over the tabs of the interface that ended last, and say which was on show.

        Only one ended interface is taken over, so that two terminals give back two sets of tabs.
        """
        rows = self._db.execute(
            "SELECT window FROM chat WHERE window IS NOT NULL GROUP BY window ORDER BY max(updated) DESC"
        ).fetchall()
        ended = next((window for (window,) in rows if not self.window.is_alive(window)), None)
        if ended is None:
            return [], None
        # A negative position marks the tab on show: -1 - position.
        found = self._db.execute(
            f"SELECT position, {_CHAT} FROM chat WHERE window = ? "
            "ORDER BY CASE WHEN position < 0 THEN -1 - position ELSE position END",
            (ended,),
        ).fetchall()
        chats = [_chat(row[1:]) for row in found]
        active = next((row[1] for row in found if row[0] < 0), None)
        self._db.execute("UPDATE chat SET window = ? WHERE window = ?", (self.window.id, ended))
        return chats, active

    def _mark_interrupted(self) -> None:
        """Answers that were streaming in an interface that has ended keep what was saved of them."""
        rows = self._db.execute("SELECT DISTINCT window FROM message WHERE status = 'streaming'").fetchall()
        for (window,) in rows:
            if window is None or not self.window.is_alive(window):
                self._db.execute(
                    "UPDATE message SET status = 'interrupted' WHERE status = 'streaming' AND window IS ?",
                    (window,),
                )


def _row_id(cursor: sqlite3.Cursor) -> int:
    assert cursor.lastrowid is not None  # always set after an INSERT
    return cursor.lastrowid


def _chat(row: tuple[object, ...]) -> ChatRecord:
    fields = list(row)
    fields[6] = json.loads(str(row[6]))
    return ChatRecord(*fields)  # type: ignore[arg-type]


def _message(row: tuple[object, ...]) -> MessageRecord:
    fields = list(row)
    fields[8] = tuple(Attachment(**entry) for entry in json.loads(str(row[8])))
    fields[12] = AnswerFigures(**json.loads(str(row[12])))
    return MessageRecord(*fields)  # type: ignore[arg-type]
