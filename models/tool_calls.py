"""Reading the tool calls that models write: JSON, Mistral's, XML-like, Pythonic, and channel formats."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ARGS_HEADER = re.compile(r"([\w.-]+)\s*\[ARGS\]\s*")
_CHANNEL = re.compile(r"(?:functions\.)?([\w.-]+).*?<\|message\|>(.*)", re.DOTALL)
_XML_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|$)", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARG_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_KIMI = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(\{.*?\})\s*"
                   r"<\|tool_call_end\|>", re.DOTALL)  # fmt: skip
MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call by name, its arguments as a JSON object."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in the text of one `tool_call` piece; empty if it cannot be read as any known format."""
    text = text.strip()
    if not text or len(text) > MAX_TEXT:
        return []
    for read in _READERS:
        try:
            calls = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if calls:
            return calls
    return []


def _from_json(text: str) -> list[ToolCall]:
    """{"name": ..., "arguments": {...}}, or "parameters", or a list of them, or several in a row."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    at = 0
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        for item in value if isinstance(value, list) else [value]:
            calls.append(_from_object(item))
        while at < len(text) and text[at] in " \t\r\n;,":
            at += 1
    return calls


def _from_object(item: Any) -> ToolCall:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ValueError("no call by name")
    arguments = item.get("arguments", item.get("parameters", {}))
    return ToolCall(item["name"], _object(arguments))


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are not an object")
    return value


def _from_args_headers(text: str) -> list[ToolCall]:
    """name[ARGS]{...}, repeated."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    at = 0
    while match := _ARGS_HEADER.search(text, at):
        arguments, at = decoder.raw_decode(text, match.end())
        calls.append(ToolCall(match[1], _object(arguments)))
    return calls


def _from_channel(text: str) -> list[ToolCall]:
    """functions.NAME <|constrain|>json<|message|>{...}"""
    match = _CHANNEL.fullmatch(text)
    return [ToolCall(match[1], _object(match[2].strip() or "{}"))] if match else []


def _from_kimi(text: str) -> list[ToolCall]:
    return [ToolCall(name, _object(arguments)) for name, arguments in _KIMI.findall(text)]


def _from_xml(text: str) -> list[ToolCall]:
    """<function=NAME><parameter=KEY>VALUE</parameter>...</function>"""
    return [
        ToolCall(name, {key: _literal(value) for key, value in _XML_PARAMETER.findall(body)})
        for name, body in _XML_FUNCTION.findall(text)
    ]


def _from_arg_pairs(text: str) -> list[ToolCall]:
    """NAME, then <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> ..."""
    name = text.partition("<arg_key>")[0].strip()
    pairs = _ARG_PAIR.findall(text)
    if not re.fullmatch(r"[\w.-]+", name):
        return []
    return [ToolCall(name, {key.strip(): _literal(value) for key, value in pairs})]


def _literal(text: str) -> Any:
    """A value that may be JSON, and else is a string as it stands."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_python(text: str) -> list[ToolCall]:
    """[name(key=value, ...), ...]: parsed, never evaluated."""
    tree = ast.parse(text, mode="eval").body
    items = tree.elts if isinstance(tree, ast.List) else [tree]
    calls = []
    for item in items:
        if not isinstance(item, ast.Call) or item.args or any(keyword.arg is None for keyword in item.keywords):
            raise ValueError("not a list of calls with named arguments")
        calls.append(
            ToolCall(
                ast.unparse(item.func),
                {str(keyword.arg): ast.literal_eval(_json_names(keyword.value)) for keyword in item.keywords},
            )
        )
    return calls


def _json_names(node: ast.expr) -> ast.expr:
    """true, false and null within values, which templates write as JSON does."""
    values = {"true": True, "false": False, "null": None}

    class Names(ast.NodeTransformer):
        def visit_Name(self, name: ast.Name) -> ast.expr:
            return ast.copy_location(ast.Constant(values[name.id]), name) if name.id in values else name

    return Names().visit(node)


_READERS: tuple[Callable[[str], list[ToolCall]], ...] = (
    _from_json, _from_args_headers, _from_channel, _from_kimi, _from_xml, _from_python, _from_arg_pairs,
)  # fmt: skip
