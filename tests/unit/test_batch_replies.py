"""Thinking and tool calls stand beside the content of a batch record, and nothing of an answer is lost."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from rich.console import Console

from mlxbatch.batch.output import OutputOptions
from mlxbatch.batch.progress import SilentReporter
from mlxbatch.batch.session import RunOptions, run_batch
from mlxbatch.config import EngineConfig
from mlxbatch.models.reply import FunctionCall, Reply, read_reply
from mlxbatch.models.tags import TagSet, detect_tags

Body = dict[str, Any]
PLAIN_TAGS = detect_tags("<tool_call>", {"<think>": False, "</think>": False, "<|im_end|>": True})
SPECIAL_TAGS = detect_tags(
    "<tool_call>", {"<think>": True, "</think>": True, "<tool_call>": True, "</s>": True, "<|im_end|>": True}
)
HARMONY = detect_tags(None, {"<|channel|>": True, "<|message|>": True, "<|end|>": True, "<|constrain|>": True})
CALL = '{"name": "add", "arguments": {"a": 1, "to": "é"}}'
BAD = "<tool_call>\n{add: 1}\n</tool_call>"


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine: FakeEngine | None = None

    def __call__(self, tags: TagSet, lines: list[Body], config: EngineConfig | None = None) -> list[Body]:
        """The records of these lines, in their order."""
        source, out = self.folder / "in.jsonl", self.folder / "out.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))

        def open_engine(config: EngineConfig, *, progress: object, trace: bool) -> FakeEngine:
            self.engine = FakeEngine(config, tags)
            return self.engine

        output = OutputOptions(out, overwrite=True)
        options = RunOptions(str(source), output, config or EngineConfig(), order="input")
        assert run_batch(options, open_engine, SilentReporter(Console(file=StringIO())), None) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    def choice(self, tags: TagSet, said: str, **body: Any) -> Body:
        """Of the OpenAI record of a chat whose answer is `said`."""
        body = {"messages": [{"role": "user", "content": f"SAY {said}"}]} | body
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        [record] = self(tags, [line])
        return record["response"]["body"]["choices"][0]

    def plain(self, tags: TagSet, said: str, **body: Any) -> Body:
        [record] = self(tags, [{"messages": [{"role": "user", "content": f"SAY {said}"}]} | body])
        return record

    @property
    def params(self) -> Any:
        assert self.engine is not None
        return self.engine.submitted[0].params


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_thinking_stands_apart_from_content(run: Run) -> None:
    choice = run.choice(PLAIN_TAGS, "<think>\nTwo.\n</think>\n\nYes.")
    assert choice["message"] == {
        "role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "Two."
    }  # fmt: skip
    assert choice["finish_reason"] == "stop"
    record = run.plain(PLAIN_TAGS, "<think>\nTwo.\n</think>\n\nYes.")
    assert (record["text"], record["reasoning"]) == ("Yes.", "Two.")
    assert "tool_calls" not in record


def test_an_answer_without_markup_has_no_new_fields(run: Run) -> None:
    assert run.choice(PLAIN_TAGS, "Yes.")["message"].keys() == {"role", "content", "refusal"}
    assert run.plain(PLAIN_TAGS, "Yes.").keys() == {"custom_id", "text", "finish_reason", "usage"}


def test_the_template_may_open_the_thinking_for_one_line_and_not_for_the_next(run: Run) -> None:
    message = {"messages": [{"role": "user", "content": "SAY Hm.</think>Yes."}]}
    think = {"chat_template_kwargs": {"think": True}}
    records = run(PLAIN_TAGS, [message | think, message])
    assert [(r["text"], r.get("reasoning")) for r in records] == [("Yes.", "Hm."), ("Hm.</think>Yes.", None)]
    [record] = run(PLAIN_TAGS, [message], EngineConfig(chat_template_args={"think": True}))
    assert (record["text"], record["reasoning"]) == ("Yes.", "Hm.")


def test_thinking_that_the_limit_cut_off_is_not_content(run: Run) -> None:
    choice = run.choice(PLAIN_TAGS, "<think>a long thought", max_tokens=13)
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "a long"
    assert choice["finish_reason"] == "length"


def test_a_tool_call_in_openai_form(run: Run) -> None:
    choice = run.choice(PLAIN_TAGS, f"<think>Add.</think><tool_call>\n{json.dumps(json.loads(CALL))}\n</tool_call>")
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "Add.")
    [call] = message["tool_calls"]
    assert call.keys() == {"id", "type", "function"} and call["type"] == "function" and call["id"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "to": "é"}
    assert choice["finish_reason"] == "tool_calls"


def test_several_calls_have_several_ids_and_plain_records_have_them_too(run: Run) -> None:
    said = "Both. " + 2 * '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    record = run.plain(PLAIN_TAGS, said)
    assert record["text"].strip() == "Both."
    assert [call["function"] for call in record["tool_calls"]] == [{"name": "f", "arguments": "{}"}] * 2
    assert len({call["id"] for call in record["tool_calls"]}) == 2
    assert record["finish_reason"] == "tool_calls"


def test_a_call_that_cannot_be_read_stays_in_the_content(run: Run) -> None:
    choice = run.choice(PLAIN_TAGS, f"Here: {BAD}")
    assert choice["message"] == {"role": "assistant", "content": f"Here: {BAD}", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_calls_in_an_answer_that_was_cut_off_do_not_change_why_it_ended(run: Run) -> None:
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call> and'
    choice = run.choice(PLAIN_TAGS, said, max_tokens=len(said))
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "length"


def test_tags_that_are_special_tokens_are_asked_for_and_no_other_special_token_leaks(run: Run) -> None:
    choice = run.choice(SPECIAL_TAGS, "<think>Two.<|im_end|></think>Yes.</s>")
    assert run.params.skip_special_tokens is False
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Yes.", "Two.")
    choice = run.choice(PLAIN_TAGS, "Yes.")
    assert run.params.skip_special_tokens is True


@pytest.mark.parametrize("skip", [True, False])
def test_a_line_that_says_what_to_do_with_special_tokens_is_obeyed(run: Run, skip: bool) -> None:
    choice = run.choice(SPECIAL_TAGS, "Yes.</s>", skip_special_tokens=skip)
    assert run.params.skip_special_tokens is skip
    assert choice["message"]["content"] == "Yes.</s>"


def test_completions_stay_raw(run: Run) -> None:
    [record] = run(SPECIAL_TAGS, [{"prompt": "SAY <think>Two.</think>Yes.</s>"}])
    assert record["text"] == "<think>Two.</think>Yes.</s>"
    assert record.keys() == {"custom_id", "text", "finish_reason", "usage"}
    assert run.params.skip_special_tokens is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Done.",
            Reply("Done.", "Think."),
        ),
        (
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
            Reply("", None, (FunctionCall("add", '{"a": 1}'),)),
        ),
    ],
)
def test_channels(text: str, expected: Reply) -> None:
    assert read_reply(text, HARMONY) == expected


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": "\\ud800"}', "[1]", '{"a": ' + "[" * 3000 + "]" * 3000 + "}"]
)
def test_arguments_that_json_cannot_hold_stay_text(arguments: str) -> None:
    text = f'a <tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read_reply(text, PLAIN_TAGS) == Reply(text)


def test_an_unclosed_call_stays_as_it_was_written() -> None:
    assert read_reply("a <tool_call> {", PLAIN_TAGS) == Reply("a <tool_call> {")


def test_text_without_tags_is_left_alone() -> None:
    text = " <think>kept</think> </s> "
    assert read_reply(text, TagSet()) == Reply(text)
    assert read_reply("a</s>", SPECIAL_TAGS, drop_stray=False) == Reply("a</s>")
