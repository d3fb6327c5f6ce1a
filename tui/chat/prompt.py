"""From a conversation to the messages that the model gets, cut to what fits the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from mlxbatch.errors import RequestError
from mlxbatch.history.records import MessageRecord

ChatMessage = dict[str, object]
Counter = Callable[[list[ChatMessage]], Awaitable[int]]

ANSWER_SHARE = 4  # of the context, one part in four is kept for the answer when max_tokens does not say
SPARE_SHARE = 4  # once turns must go, a further quarter of the room is freed, so that the prompt's
#                  beginning stays the same for some turns and its KV comes from the prefix cache


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    messages: list[ChatMessage]
    tokens: int
    dropped: int  # oldest turns left out


def chat_messages(system_prompt: str, turns: Sequence[MessageRecord]) -> list[ChatMessage]:
    """The system prompt and the turns. Answers without text are left out, and turns of one role that then
    stand together are joined, since chat templates want them to alternate."""
    messages: list[ChatMessage] = []
    if system_prompt.strip():
        messages.append({"role": "system", "content": system_prompt})
    for turn in turns:
        content = turn_text(turn)
        if not content.strip():
            continue
        if messages and messages[-1]["role"] == turn.role:
            messages[-1] = {"role": turn.role, "content": f"{messages[-1]['content']}\n\n{content}"}
        else:
            messages.append({"role": turn.role, "content": content})
    return messages


def turn_text(turn: MessageRecord) -> str:
    """What the model reads of a turn: its files first, then its text. Thinking is not repeated to it."""
    parts = []
    for attachment in turn.attachments:
        fence = "```"
        while fence in attachment.text:
            fence += "`"
        body = attachment.text.rstrip("\n")
        parts.append(f"File {attachment.name}:\n{fence}\n{body}\n{fence}")
    return "\n\n".join([*parts, turn.content] if turn.content else parts)


async def fit_prompt(
    system_prompt: str,
    turns: Sequence[MessageRecord],
    count: Counter,
    *,
    context: int,
    max_tokens: int | None,
    dropped_before: int = 0,
) -> FittedPrompt:
    """The newest turns that leave room for an answer; the system prompt and the last turn always stay.

    `context` 0 means unknown: nothing is dropped. `dropped_before` is what the previous prompt of this
    conversation left out; the same cut is kept as long as it fits. Turns leave from the front in pairs, so
    that what remains begins with the user's turn. Raises RequestError when even the last turn does not fit.
    """

    async def tokens_without(dropped: int) -> int:
        return await count(chat_messages(system_prompt, turns[dropped:]))

    room = context - min(max_tokens or context // ANSWER_SHARE, context // 2) if context else 0
    starts = [index for index, turn in enumerate(turns) if turn.role == "user" and index]
    kept = dropped_before if dropped_before in starts else 0
    tokens = await tokens_without(kept)
    if not context or tokens <= room:
        return FittedPrompt(chat_messages(system_prompt, turns[kept:]), tokens, kept)

    goal = room - room // SPARE_SHARE
    candidates = [start for start in starts if start > kept]
    low, high = 0, len(candidates)  # candidates before `low` are too few, `high` drops enough (or is the end)
    sizes: dict[int, int] = {}
    while low < high:
        middle = (low + high) // 2
        sizes[middle] = await tokens_without(candidates[middle])
        if sizes[middle] <= goal:
            high = middle
        else:
            low = middle + 1
    if low == len(candidates):  # not even the last turn alone leaves the spare quarter
        low -= 1
        if low >= 0 and low not in sizes:
            sizes[low] = await tokens_without(candidates[low])
    dropped, tokens = (candidates[low], sizes[low]) if low >= 0 else (kept, tokens)
    if tokens >= context:
        raise _too_long(tokens, context)
    return FittedPrompt(chat_messages(system_prompt, turns[dropped:]), tokens, dropped)


def _too_long(tokens: int, context: int) -> RequestError:
    return RequestError(
        f"your message and the system prompt are {tokens:,} tokens, and the model's context holds {context:,}. "
        "Shorten it, attach a smaller file, or choose a model with a longer context (Ctrl+L).",
        code="context_length_exceeded",
    )
