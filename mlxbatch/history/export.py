"""A conversation as Markdown to read, or as JSON that loses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from mlxbatch.errors import UsageError
from mlxbatch.history.records import ChatRecord, MessageRecord


def to_markdown(chat: ChatRecord, path: Sequence[MessageRecord]) -> str:
    """The version on show, one heading for each turn."""
    parts = [f"# {chat.title or 'Chat'}"]
    if chat.system_prompt:
        parts.append("## system\n\n" + chat.system_prompt)
    for message in path:
        when = datetime.fromtimestamp(message.created).strftime("%Y-%m-%d %H:%M")
        who = "you" if message.role == "user" else message.model or "assistant"
        parts.append(f"## {who} · {when}")
        for attachment in message.attachments:
            fence = _fence(attachment.text)
            parts.append(f"File `{attachment.name}`:\n\n{fence}\n{attachment.text}\n{fence}")
        if message.reasoning:
            parts.append("<details><summary>thinking</summary>\n\n" + message.reasoning.strip() + "\n\n</details>")
        if message.content.strip():
            parts.append(message.content.strip())
        if message.status not in ("complete", "streaming"):
            parts.append(f"*({message.status})*")
    return "\n\n".join(parts) + "\n"


def to_json(chat: ChatRecord, messages: Sequence[MessageRecord]) -> str:
    """Every turn of every version; `parent` and `leaf` say which belongs to which."""
    return json.dumps({"chat": asdict(chat), "messages": [asdict(m) for m in messages]}, ensure_ascii=False, indent=2)


def write_export(target: Path, text: str) -> None:
    """Write a new file. Raises UsageError rather than replace one that exists."""
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{target} exists already; give another name, as in /export md other.md") from None
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None


def _fence(text: str) -> str:
    """A code fence longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return fence
