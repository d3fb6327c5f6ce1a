"""Lines of an input file: what is served, what is refused, and where a refusal points."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.batch.body import mixed_seed
from mlxbatch.batch.formats import LineReader, check_defaults, detect_format
from mlxbatch.batch.item import BatchItem, LineError, RequestDefaults
from mlxbatch.errors import RequestError, UsageError

USER = [{"role": "user", "content": "hi"}]


def openai(body: dict[str, Any], url: str = "/v1/chat/completions", **outer: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body} | outer).encode()


def read(text: bytes | dict[str, Any], format: Any = "openai", **defaults: Any) -> BatchItem:
    line = text if isinstance(text, bytes) else json.dumps(text).encode()
    return LineReader(format, RequestDefaults(**defaults)).read(7, line)


def refused(text: bytes | dict[str, Any], format: Any = "openai") -> LineError:
    with pytest.raises(LineError) as caught:
        read(text, format)
    return caught.value


def test_every_chat_parameter_reaches_the_sampler() -> None:
    body = {
        "model": "gpt-4o",
        "messages": USER,
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 3,
        "stop": ["x", "y"],
        "seed": 5,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"12": -100},
        "logprobs": True,
        "top_logprobs": 4,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "metadata": {"batch": "1"},
        "user": "u",
    }
    item = read(openai(body))
    assert item.params.as_dict() == {
        "n": 3,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {"12": -100},
        "seed": 5,
        "logprobs": 4,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop": ["x", "y"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    assert item.messages == USER
    assert item.template_args == {"enable_thinking": False}
    assert item.metadata == {"batch": "1"}
    assert item.named_model == "gpt-4o"
    assert (item.custom_id, item.line, item.answers) == ("a", 7, 3)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ("one",)),
        (["one", "two"], ("one", "two")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_the_four_forms_of_a_completion_prompt(prompt: Any, prompts: Any) -> None:
    item = read(openai({"prompt": prompt, "n": 2, "logprobs": 3}, "/v1/completions"))
    assert item.prompts == prompts
    assert item.answers == 2 * len(prompts)
    assert item.params.logprobs == 3
    assert item.params.max_tokens == 16  # OpenAI's default for this endpoint


def test_limits_that_nobody_names_are_left_to_the_context() -> None:
    assert read(openai({"messages": USER})).params.max_tokens is None
    assert read({"prompt": "x"}, "messages").params.max_tokens is None


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"messages": USER, "max_tokens": "x"}, "invalid_request", "max_tokens"),
        ({"messages": USER, "max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"messages": USER, "max_completion_tokens": 0}, "invalid_request", "max_completion_tokens"),
        ({"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "invalid_request", "max_completion_tokens"),
        ({"messages": USER, "temprature": 1}, "unknown_parameter", "temprature"),
        ({"messages": USER, "tools": [{}]}, "unsupported_parameter", "tools"),
        ({"messages": USER, "stream": True}, "unsupported_parameter", "stream"),
        ({"messages": USER, "response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"messages": USER, "n": 129}, "invalid_request", "n"),
        ({"messages": USER, "top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "invalid_request", "top_logprobs"),
        ({"messages": USER, "logit_bias": {"the": 1}}, "invalid_request", "logit_bias"),
        ({"messages": USER, "stop": ["a", 1]}, "invalid_request", "stop[1]"),
        ({"messages": []}, "invalid_request", "messages"),
        ({}, "invalid_request", None),
        ({"messages": [*USER, {"role": "robot", "content": ""}]}, "invalid_request", "messages[1].role"),
        ({"messages": [*USER, {"role": "user"}]}, "invalid_request", "messages[1].content"),
        ({"messages": [*USER, {"role": "user", "content": 3}]}, "invalid_request", "messages[1].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "unknown_parameter", "messages[0].mood"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
            "unsupported_parameter",
            "messages[0].content[1]",
        ),
    ],
)
def test_a_refused_chat_points_at_the_culprit(body: dict[str, Any], code: str, param: str | None) -> None:
    error = refused(openai(body))
    assert (error.code, error.param, error.custom_id) == (code, param, "a")
    assert f"at $.body{'.' + param if param else ''}" in str(error)


@pytest.mark.parametrize("prompt", [None, [], [[]], 3, ["a", 3], [1, "a"], [True], [-1], [[1], [2.5]]])
def test_a_wrong_prompt_is_refused(prompt: Any) -> None:
    error = refused(openai({"prompt": prompt}, "/v1/completions"))
    assert error.param is not None
    assert error.param.startswith("prompt")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"a": 1} tail', "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": "\xff"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[1]", "invalid_request"),
        (openai({"messages": USER}, url="/v1/embeddings"), "invalid_request"),
        (openai({"messages": USER}, method="GET"), "invalid_request"),
        (openai({"messages": USER}, custom_id=5), "invalid_request"),
        (openai({"messages": USER}, priority=5), "unknown_parameter"),
        (b'{"custom_id": "a"}', "invalid_request"),
    ],
)
def test_a_broken_line_is_refused(text: bytes, code: str) -> None:
    assert refused(text).code == code


@pytest.mark.parametrize(
    "neutral",
    [{"stream": False}, {"tools": []}, {"tools": None}, {"response_format": {"type": "text"}}, {"temperature": None}],
)
def test_a_value_that_asks_for_nothing_is_accepted(neutral: dict[str, Any]) -> None:
    assert read(openai({"messages": USER} | neutral)) == read(openai({"messages": USER}))


def test_text_parts_are_joined_and_developer_is_system() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert read(openai({"messages": messages})).messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
    ]


def test_plain_lines_take_an_id_and_parameters_beside_the_prompt() -> None:
    item = read({"id": 12, "prompt": "x", "temperature": 0}, "messages")
    assert (item.custom_id, item.prompts, item.params.greedy) == (12, ("x",), True)
    assert read({"messages": USER}, "messages").custom_id == "line-7"
    assert refused({"messages": USER, "prompt": "x"}, "messages").code == "invalid_request"
    assert refused({"messages": USER, "id": "a", "custom_id": "b"}, "messages").param == "id"
    assert refused({"messages": USER, "id": 1.5}, "messages").param == "custom_id"


def test_a_text_line_is_one_user_message() -> None:
    item = read(' Zwölf {"x"} '.encode(), "text", system="s")
    assert item.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": ' Zwölf {"x"} '}]
    assert refused(b"\xff\xfe", "text").code == "invalid_text"


def test_defaults_fill_what_a_line_leaves_out_and_nothing_else() -> None:
    defaults = {"max_tokens": 3, "temperature": 0.0, "top_k": 5, "stop": ("s",), "system": "be brief"}
    item = read(openai({"messages": USER}), **defaults)
    assert (item.params.max_tokens, item.params.temperature, item.params.top_k) == (3, 0.0, 5)
    assert item.params.stop == ("s",)
    assert item.messages == [{"role": "system", "content": "be brief"}, *USER]
    own = [{"role": "system", "content": "own"}, *USER]
    item = read(openai({"messages": own, "max_tokens": 8, "stop": "t", "temperature": 1}), **defaults)
    assert (item.params.max_tokens, item.params.temperature, item.params.stop) == (8, 1.0, ("t",))
    assert item.messages == own


def test_a_run_seed_differs_by_line_and_a_lines_own_seed_is_kept() -> None:
    first, again = (read(openai({"messages": USER}), seed=1).params.seed for _ in range(2))
    other = read(openai({"messages": USER}, custom_id="b"), seed=1).params.seed
    assert first == again != other
    assert read(openai({"messages": USER, "seed": 4}), seed=1).params.seed == 4
    assert mixed_seed(1, "1") != mixed_seed(1, 1)


def test_defaults_are_checked_before_any_line() -> None:
    check_defaults(RequestDefaults(temperature=0.5, max_tokens=4))
    with pytest.raises(RequestError, match="top_p"):
        check_defaults(RequestDefaults(top_p=1.5))


@pytest.mark.parametrize(
    ("lines", "name", "expected"),
    [
        ([openai({"messages": USER})], "x.jsonl", "openai"),
        ([b"{broken", openai({"messages": USER})], "x.jsonl", "openai"),
        ([b'{"messages": []}'], "x", "messages"),
        ([b'{"id": 1, "prompt": "x"}'], "x", "messages"),
        ([b"What is 2 + 2?", b'{"prompt": "x"}'], "x", "messages"),
        ([b"What is 2 + 2?"], "x.txt", "text"),
        ([], "x.txt", "text"),
        ([], "empty.jsonl", "text"),
    ],
)
def test_the_format_is_detected(lines: list[bytes], name: str, expected: str) -> None:
    assert detect_format(lines, name) == expected


@pytest.mark.parametrize(("lines", "name"), [([b"{broken"], "x"), ([b'{"text": "x"}'], "x"), ([b"words"], "x.jsonl")])
def test_an_unclear_format_is_asked_for(lines: list[bytes], name: str) -> None:
    with pytest.raises(UsageError, match="--format"):
        detect_format(lines, name)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": USER, "max_tokens": 10**30}, "max_tokens", "64 bits"),
        ({"messages": USER, "seed": 2**64}, "seed", "64 bits"),
        ({"messages": USER, "chat_template_kwargs": {"a": [{"b": -(10**19)}]}}, "chat_template_kwargs", "64 bits"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"x": 2**64}]}]}, "messages", "64 bits"),
        ({"messages": USER, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "beside"),
        ({"messages": USER, "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    ],
)
def test_what_no_engine_could_be_sent_is_one_bad_line(body: dict[str, Any], param: str, words: str) -> None:
    error = refused(openai(body))
    assert (error.param, error.custom_id) == (param, "a")
    assert words in str(error)


def test_the_largest_numbers_are_served() -> None:
    assert read(openai({"messages": USER, "seed": 2**64 - 1})).params.seed == 2**64 - 1
    assert read(openai({"messages": USER, "seed": -(2**63)})).params.seed == -(2**63)


@pytest.mark.parametrize("depth", [300, 900])
def test_a_parameter_nested_too_deeply_is_one_bad_line(depth: int) -> None:
    line = b'{"messages": [], "id": 5, "metadata": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}"
    error = refused(line, "messages")
    assert (error.param, error.custom_id) == ("metadata", 5)
    assert "deep" in str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(["messages", "prompt", "n", "stop", "logit_bias", "seed", "logprobs", "id", "tools"])


@given(st.dictionaries(field_names | st.text(max_size=6), json_values), st.sampled_from(["openai", "messages"]))
def test_no_object_makes_a_reader_fail_in_another_way(values: dict[str, Any], format: Any) -> None:
    text = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": values}).encode()
    for line in (text, json.dumps(values).encode()):
        try:
            assert isinstance(read(line, format), BatchItem)
        except LineError as error:
            assert error.code
