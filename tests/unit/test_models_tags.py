"""Reasoning, answer and tool calls told apart, in chunks of any size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.models.tags import Piece, TagSet, TagSplitter, detect_tags
from mlxbatch.models.tool_calls import ToolCall, parse_tool_calls

QWEN = detect_tags("{% if x %}<tool_call>{% endif %}", {"<think>": False, "</think>": False, "<|im_end|>": True})
HARMONY = detect_tags("... <|channel|>analysis<|message|> ...", {"<|channel|>": True})
MISTRAL = detect_tags(None, {"[TOOL_CALLS]": True, "[THINK]": True, "[/THINK]": True})


def split(tags: TagSet, chunks: list[str], prompt: str = "") -> list[Piece]:
    splitter = TagSplitter(tags, prompt)
    pieces = [piece for chunk in chunks for piece in splitter.push(chunk)] + splitter.finish()
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].kind == piece.kind != "tool_call":
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


CALL = '{"name": "add", "arguments": {"a": 1}}'
SAMPLES = [
    (
        QWEN, "",
        f"<think>\nTwo < three.\n</think>\n\nYes.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>",
        [("reasoning", "Two < three."), ("content", "Yes.\n"), ("tool_call", CALL), ("tool_call", CALL)],
    ),
    (QWEN, "<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    (QWEN, "<think>\n\n</think>\n\n", " Yes.", [("content", " Yes.")]),
    (QWEN, "", "  <thin ice> and </think", [("content", "  <thin ice> and </think")]),
    (QWEN, "", "\n<think>a</think>\nb", [("reasoning", "a"), ("content", "b")]),
    (QWEN, "", "<think>cut off ", [("reasoning", "cut off")]),
    (QWEN, "", " \n", [("content", " \n")]),
    (QWEN, "", "<tool_call>\n" + CALL, [("tool_call", CALL)]),
    (
        HARMONY, "",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
        [("reasoning", "Think."), ("content", "Done.")],
    ),
    (
        HARMONY, "",
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        [("tool_call", 'functions.add <|constrain|>json<|message|>{"a": 1}')],
    ),
    (MISTRAL, "", f"[THINK]a[/THINK]b[TOOL_CALLS][{CALL}]", [("reasoning", "a"), ("content", "b"),
                                                            ("tool_call", f"[{CALL}]")]),
    (TagSet(), "", " <think>kept</think> ", [("content", " <think>kept</think> ")]),
]  # fmt: skip


@pytest.mark.parametrize(("tags", "prompt", "text", "expected"), SAMPLES)
def test_whole_texts(tags: TagSet, prompt: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert [(piece.kind, piece.text) for piece in split(tags, [text], prompt)] == expected


@given(st.sampled_from(SAMPLES), st.lists(st.integers(0, 120), max_size=12))
def test_chunks_do_not_matter(sample: tuple[TagSet, str, str, object], cuts: list[int]) -> None:
    tags, prompt, text, _ = sample
    points = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[start:end] for start, end in pairwise(points)]
    assert split(tags, chunks, prompt) == split(tags, [text], prompt)


@given(st.text(alphabet="<>/think tol_ca\n", max_size=60), st.integers(1, 5))
def test_nothing_is_lost_or_made_up(text: str, size: int) -> None:
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    joined = "".join(piece.text for piece in split(QWEN, chunks))
    for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        text, joined = text.replace(mark, ""), joined.replace(mark, "")
    assert "".join(joined.split()) == "".join(text.split())


def test_text_is_not_held_back_longer_than_needed() -> None:
    splitter = TagSplitter(QWEN)
    assert splitter.push("All good") == [Piece("content", "All good")]
    assert splitter.push(" <thi") == [Piece("content", " ")]
    assert splitter.push("ngs>") == [Piece("content", "<things>")]


def test_whether_the_tags_are_special_tokens() -> None:
    assert not QWEN.special and QWEN.has_reasoning and QWEN.has_tools
    assert HARMONY.special and MISTRAL.special
    assert detect_tags("<think>", {"<think>": True}).special
    assert detect_tags(None) == TagSet()


ONE = [ToolCall("add", {"a": 1, "b": "x"})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "arguments": {"a": 1, "b": "x"}}',
        '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
        '[{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}]',
        'add[ARGS]{"a": 1, "b": "x"}',
        'functions.add <|constrain|>json<|message|>{"a": 1, "b": "x"}',
        "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>",
        "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x</arg_value>",
        '[add(a=1, b="x")]',
        '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": "x"}<|tool_call_end|>',
    ],
)
def test_tool_calls_of_every_format(text: str) -> None:
    assert parse_tool_calls(text) == ONE


def test_several_calls_in_one_piece() -> None:
    assert parse_tool_calls("[f(x=true), g.h(y=[null])]") == [
        ToolCall("f", {"x": True}),
        ToolCall("g.h", {"y": [None]}),
    ]
    both = '{"name": "f", "arguments": {}}; {"name": "g", "arguments": {}}'
    assert parse_tool_calls(both) == [ToolCall("f", {}), ToolCall("g", {})]


@pytest.mark.parametrize(
    "text",
    ["", "plain words", "{", "[" * 5000, "__import__('os').system('true')", "f(1)", "f(x=open('/x'))", '{"a": 1}'],
)
def test_what_is_no_call_gives_none(text: str) -> None:
    assert parse_tool_calls(text) == []
