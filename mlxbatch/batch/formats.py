"""Which format an input file has, and how its lines are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from mlxbatch.batch.body import BodyReader
from mlxbatch.batch.item import BatchFormat, BatchItem, CustomId, LineError, RequestDefaults
from mlxbatch.batch.schema import COMPLETION_MAX_TOKENS, OpenAILine, PlainLine
from mlxbatch.errors import UsageError
from mlxbatch.request import SamplingParams

LINES_LOOKED_AT = 50
_DECODER = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class LineReader:
    """Reads the lines of one file. `read` is a pure function of the line: both passes call it."""

    format: BatchFormat
    defaults: RequestDefaults

    def read(self, line: int, text: bytes) -> BatchItem:
        """The request on line number `line`. Raises LineError."""
        if self.format == "text":
            return self._text(line, text)
        values = _json_object(text)
        return self._openai(line, values) if self.format == "openai" else self._plain(line, values)

    def _text(self, line: int, text: bytes) -> BatchItem:
        try:
            prompt = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise LineError(f"the line is not UTF-8: {error}", code="invalid_text") from None
        reader = BodyReader(line, f"line-{line}", "$", self.defaults)
        return reader.chat({"messages": [{"role": "user", "content": prompt}]})

    def _openai(self, line: int, values: dict[str, Any]) -> BatchItem:
        custom_id = values.get("custom_id")
        known = custom_id if isinstance(custom_id, str) else None
        envelope = BodyReader(line, known or "", "$", self.defaults)
        try:
            outer = envelope.convert(values, OpenAILine)
        except LineError as error:
            error.custom_id = known
            raise
        reader = BodyReader(line, outer.custom_id, "$.body", self.defaults)
        if outer.url == "/v1/chat/completions":
            return reader.chat(outer.body)
        return reader.completion(outer.body, COMPLETION_MAX_TOKENS)

    def _plain(self, line: int, values: dict[str, Any]) -> BatchItem:
        custom_id: CustomId | None = None
        try:
            ids = msgspec.convert(values, PlainLine)
        except msgspec.ValidationError:
            raise LineError("an id is a text or a whole number", path="$", param="custom_id") from None
        if ids.custom_id is not None and ids.id is not None:
            raise LineError("custom_id and id are both given", path="$", param="id", custom_id=ids.custom_id)
        custom_id = ids.custom_id if ids.custom_id is not None else ids.id
        body = {name: value for name, value in values.items() if name not in ("custom_id", "id")}
        reader = BodyReader(line, f"line-{line}" if custom_id is None else custom_id, "$", self.defaults)
        if ("messages" in body) == ("prompt" in body):
            reader.refuse("a line has either messages or a prompt")
        return reader.chat(body) if "messages" in body else reader.completion(body)


def check_defaults(defaults: RequestDefaults) -> None:
    """Raises RequestError when a run's default parameters are out of range, before any line is read."""
    given = {name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p", "stop")}
    SamplingParams(
        max_tokens=defaults.max_tokens, **{name: value for name, value in given.items() if value is not None}
    )


def detect_format(first_lines: list[bytes], name: str) -> BatchFormat:
    """The format that the first JSON object shows; text when no line looks like one.

    Raises UsageError when lines look like JSON and none can be read.
    """
    looks_like_json = name.endswith((".jsonl", ".json", ".ndjson"))
    for text in first_lines[:LINES_LOOKED_AT]:
        if not text.startswith(b"{"):
            continue
        looks_like_json = True
        try:
            values = _json_object(text)
        except LineError:
            continue
        if "messages" in values or "prompt" in values:
            return "messages"
        if values.keys() & {"body", "url", "method"}:
            return "openai"
    if looks_like_json and first_lines:
        raise UsageError(
            f"{name}: cannot tell the format: among the first lines there is no OpenAI Batch request "
            '(custom_id, method, url, body), no {"messages": ...} and no {"prompt": ...}; see --format'
        )
    return "text"


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        values = _DECODER.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineError(f"not JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise LineError("the line is JSON, but not an object", path="$")
    return values
