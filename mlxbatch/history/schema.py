"""Tables of the history file and the steps that bring an older file up to date.

`PRAGMA user_version` counts the migrations that a file has seen. A migration, once released, never
changes; a new one is added at the end of the list.
"""

from __future__ import annotations

import sqlite3

from mlxbatch.errors import UsageError

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE chat (
        id INTEGER PRIMARY KEY,
        title TEXT NOT NULL DEFAULT '',
        created REAL NOT NULL,
        updated REAL NOT NULL,
        model TEXT NOT NULL DEFAULT '',
        system_prompt TEXT NOT NULL DEFAULT '',
        sampling TEXT NOT NULL DEFAULT '{}',
        draft TEXT NOT NULL DEFAULT '',
        leaf INTEGER,
        window TEXT,
        position INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE message (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        chat INTEGER NOT NULL REFERENCES chat (id) ON DELETE CASCADE,
        parent INTEGER REFERENCES message (id) ON DELETE CASCADE,
        role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
        content TEXT NOT NULL,
        created REAL NOT NULL,
        status TEXT NOT NULL DEFAULT 'complete',
        reasoning TEXT NOT NULL DEFAULT '',
        attachments TEXT NOT NULL DEFAULT '[]',
        model TEXT NOT NULL DEFAULT '',
        dropped INTEGER NOT NULL DEFAULT 0,
        note TEXT NOT NULL DEFAULT '',
        figures TEXT NOT NULL DEFAULT '{}',
        window TEXT
    );
    CREATE INDEX message_by_chat ON message (chat, id);
    CREATE INDEX message_by_parent ON message (parent);
    CREATE INDEX chat_by_time ON chat (updated);
    CREATE VIRTUAL TABLE message_text USING fts5 (
        content, content = 'message', content_rowid = 'id', tokenize = "unicode61 remove_diacritics 2"
    );
    CREATE TRIGGER message_added AFTER INSERT ON message BEGIN
        INSERT INTO message_text (rowid, content) VALUES (new.id, new.content);
    END;
    CREATE TRIGGER message_changed AFTER UPDATE OF content ON message BEGIN
        INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', old.id, old.content);
        INSERT INTO message_text (rowid, content) VALUES (new.id, new.content);
    END;
    CREATE TRIGGER message_removed AFTER DELETE ON message BEGIN
        INSERT INTO message_text (message_text, rowid, content) VALUES ('delete', old.id, old.content);
    END;
    """,
)


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Bring the file to the newest version. Each step commits together with its version number, so a
    kill between two statements leaves the file at the version before.

    Raises UsageError for a file that a newer mlxbatch has written.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise UsageError(
            f"{path} was written by a newer mlxbatch (history version {version}, this one reads up to "
            f"{len(MIGRATIONS)}). Update mlxbatch, or choose another file with --history FILE."
        )
    for number in range(version, len(MIGRATIONS)):
        connection.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
