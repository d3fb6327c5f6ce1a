"""A whole answer taken apart: what is said, what was thought before it, and the tools that are called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from mlxbatch.models.tags import TagSet, TagSplitter
from mlxbatch.models.tool_calls import parse_tool_calls


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """`arguments` is a JSON object as text, as in OpenAI's API."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    content: str
    reasoning: str | None = None
    calls: tuple[FunctionCall, ...] = ()


def read_reply(text: str, tags: TagSet, prompt_end: str = "", *, drop_stray: bool = True) -> Reply:
    """Take an answer apart. `prompt_end` is the text before it, which may open the thinking.

    A call that cannot be read stays in the content as it was written. `drop_stray` takes special tokens out of
    content and reasoning, when the text came with them for the sake of the tags.
    """
    if not tags.tags:
        return Reply(text)
    splitter = TagSplitter(tags, prompt_end)
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[FunctionCall] = []
    stray = re.compile("|".join(re.escape(t) for t in sorted(tags.stray, key=len, reverse=True)) or "(?!)")
    for piece in [*splitter.push(text), *splitter.finish()]:
        if piece.kind == "tool_call":
            read = _function_calls(piece.text)
            calls += read
            if not read:
                content.append(piece.source)
            continue
        said = stray.sub("", piece.text) if drop_stray else piece.text
        (reasoning if piece.kind == "reasoning" else content).append(said)
    return Reply("".join(content), "".join(reasoning) or None, tuple(calls))


def _function_calls(text: str) -> list[FunctionCall]:
    """Empty too when the arguments hold what JSON or UTF-8 cannot."""
    try:
        calls = [
            FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False, allow_nan=False))
            for call in parse_tool_calls(text)
        ]
        for call in calls:
            (call.name + call.arguments).encode()
    except (ValueError, TypeError, RecursionError):
        return []
    return calls
