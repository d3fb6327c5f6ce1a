"""Real prompts, short and long, a few with one beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_QUESTIONS = (
    "What is the capital of Portugal?",
    "Name three prime numbers above 20.",
    "Explain recursion to a child in two sentences.",
    "Write a SQL query that counts rows per day in a table called events.",
    "Translate to French: the train leaves at noon.",
    "Why is the sky blue?",
    "List four uses of a paper clip.",
    "Who wrote Pride and Prejudice?",
)
_TEXT = (
    "Paged attention keeps the keys and values of a sequence in blocks of fixed size. A block table maps the "
    "positions of the sequence to blocks, so that memory grows token by token and a shared prefix is stored once. "
    "Continuous batching forms the batch again at every step: finished requests leave at once, and waiting ones "
    "join the very next step. Long prompts are computed in chunks beside running decodes. "
)
_SYSTEM = "You are a careful assistant who answers in plain words and never invents facts. " * 4


class _Chat(Protocol):
    def encode_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> list[int]: ...


def chat_prompts(tokenizer: _Chat, count: int) -> list[Sequence[int]]:
    """`count` chat prompts; every third has one long system prompt, every fourth a text to summarise."""
    prompts = []
    for number in range(count):
        question = _QUESTIONS[number % len(_QUESTIONS)]
        if number % 4 == 3:
            question = f"Summarise this in one sentence: {_TEXT * (1 + number // 8)}{question}"
        messages: list[dict[str, object]] = [{"role": "user", "content": f"{question} ({number})"}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": _SYSTEM})
        prompts.append(tokenizer.encode_chat(messages))
    return prompts
