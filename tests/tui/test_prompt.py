"""What of a conversation goes to the model."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxbatch.errors import RequestError
from mlxbatch.history.records import Attachment, MessageRecord
from mlxbatch.tui.chat.prompt import FittedPrompt, chat_messages, fit_prompt


def turn(number: int, role: str, content: str, **fields: object) -> MessageRecord:
    return MessageRecord(number, 1, None, role, content, 0.0, **fields)  # type: ignore[arg-type]


def conversation(sizes: list[int]) -> list[MessageRecord]:
    """Turns of so many words, the user's first and last."""
    return [turn(n, "user" if n % 2 == 0 else "assistant", "w " * size) for n, size in enumerate(sizes)]


async def words(messages: list[dict[str, object]]) -> int:
    return sum(len(str(message["content"]).split()) for message in messages)


def fit(turns: list[MessageRecord], context: int, *, system: str = "", **options: object) -> FittedPrompt:
    options.setdefault("max_tokens", None)
    return asyncio.run(fit_prompt(system, turns, words, context=context, **options))  # type: ignore[arg-type]


def test_roles_alternate_even_after_an_answer_that_failed() -> None:
    turns = [
        turn(1, "user", "one"),
        turn(2, "assistant", "", status="error"),
        turn(3, "user", "two"),
        turn(4, "assistant", "answer", reasoning="never repeated"),
        turn(5, "user", "three"),
    ]
    assert chat_messages("system", turns) == [
        {"role": "system", "content": "system"},
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "three"},
    ]


def test_files_come_before_the_text_in_a_fence_that_they_cannot_close() -> None:
    turns = [turn(1, "user", "Why?", attachments=(Attachment("a.md", "```\ncode\n```\n"),))]
    (message,) = chat_messages("", turns)
    assert message["content"] == "File a.md:\n````\n```\ncode\n```\n````\n\nWhy?"


def test_what_fits_is_left_whole() -> None:
    turns = conversation([10, 10, 10])
    assert fit(turns, 100).dropped == 0
    assert fit(turns, 0).dropped == 0  # context unknown


def test_the_oldest_go_and_the_system_prompt_stays() -> None:
    prompt = fit(conversation([20, 20, 20, 20, 10]), 100, system="stay here")
    assert prompt.dropped == 2
    assert prompt.messages[0] == {"role": "system", "content": "stay here"}
    assert prompt.messages[1]["role"] == "user"


def test_the_cut_stays_while_it_fits() -> None:
    first = fit(conversation([20] * 5), 100)
    longer = conversation([20] * 5 + [2, 2])
    assert fit(longer, 100, dropped_before=first.dropped).dropped == first.dropped
    assert fit(conversation([1, 1, 1]), 100, dropped_before=2).dropped == 2


def test_an_explicit_max_tokens_keeps_that_much_room() -> None:
    turns = conversation([31, 10, 10])
    assert fit(turns, 100, max_tokens=10).dropped == 0
    assert fit(turns, 100, max_tokens=60).dropped == 2
    assert fit(turns, 100, max_tokens=49).dropped == 0  # 51 tokens are exactly what is left
    assert fit(turns, 100, max_tokens=50).dropped == 2


def test_a_last_turn_that_leaves_little_room_still_goes() -> None:
    assert fit(conversation([5, 5, 95]), 100).dropped == 2
    with pytest.raises(RequestError, match="100 tokens, and the model's context holds 100"):
        fit(conversation([5, 5, 100]), 100)
    with pytest.raises(RequestError, match="context holds 100"):
        fit(conversation([100]), 100)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=15),
    st.integers(20, 200),
    st.one_of(st.none(), st.integers(1, 100)),
    st.integers(0, 15),
)
def test_any_conversation(sizes: list[int], context: int, max_tokens: int | None, before: int) -> None:
    turns = conversation(sizes if len(sizes) % 2 else sizes[:-1] or [1])
    try:
        prompt = fit(turns, context, max_tokens=max_tokens, dropped_before=before)
    except RequestError:
        assert len(turns[-1].content.split()) >= context
        return
    assert prompt.tokens < context
    assert prompt.tokens == asyncio.run(words(prompt.messages))
    assert prompt.messages == chat_messages("", turns[prompt.dropped :])
    assert prompt.dropped < len(turns)
    assert turns[prompt.dropped].role == "user"
