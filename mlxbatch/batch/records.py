"""The records of an output file: answers and errors, as OpenAI Batch lines or as short plain ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mlxbatch.batch.index import InputIndex
from mlxbatch.batch.item import BatchFormat, BatchItem, CustomId, LineError
from mlxbatch.errors import RequestError
from mlxbatch.models.reply import Reply
from mlxbatch.request import CompletionOutput, TokenLogprob

LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON does not have


class RecordError(msgspec.Struct, kw_only=True):
    line: int
    code: str = ""
    message: str = ""


class WrittenRecord(msgspec.Struct, kw_only=True):
    """What a resumed run reads back of a record, whatever its format."""

    custom_id: str | int | None = None
    error: RecordError | None = None

    def line_of(self, index: InputIndex) -> int | None:
        """The line of the input that it answers; errors name theirs, because not all have an id."""
        if self.error is not None:
            return self.error.line if 0 < self.error.line < len(index.states) else None
        return None if self.custom_id is None else index.line_of(self.custom_id)


@dataclass(frozen=True, slots=True)
class RecordWriter:
    """Makes the records of one run. Pure but for ids and the time of day. `text_of` decodes one token."""

    format: BatchFormat
    model: str
    text_of: Callable[[int], str]

    def error(self, line: int, custom_id: CustomId | None, code: str, message: str, param: str | None) -> Any:
        error = {"code": code, "message": message, "param": param, "line": line}
        if self.format == "openai":
            return {"id": _new_id("batch_req"), "custom_id": custom_id, "response": None, "error": error}
        return {"custom_id": custom_id, "error": error}

    def answer(
        self, item: BatchItem, outputs: list[CompletionOutput], replies: list[Reply], usage: dict[str, Any]
    ) -> Any:
        """`outputs` are the finished answers, those of the first prompt first; `replies` what they say."""
        forms = LogprobForms(self.text_of)
        if self.format == "openai":
            body = self._chat_body(outputs, replies, forms) if item.is_chat else self._text_body(outputs, forms)
            body["usage"] = usage
            if item.metadata is not None:
                body["metadata"] = item.metadata
            response = {"status_code": 200, "request_id": uuid.uuid4().hex, "body": body}
            return {
                "id": _new_id("batch_req"),
                "custom_id": item.custom_id,
                "response": response,
                "error": None,
            }
        return self._plain(item, outputs, replies, usage, forms)

    def _chat_body(
        self, outputs: list[CompletionOutput], replies: list[Reply], forms: LogprobForms
    ) -> dict[str, Any]:
        choices = []
        for index, (output, reply) in enumerate(zip(outputs, replies, strict=True)):
            message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
            if reply.reasoning is not None:
                message["reasoning_content"] = reply.reasoning
            if reply.calls:
                message["content"] = reply.content if reply.content.strip() else None
                message["tool_calls"] = tool_calls(reply)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": forms.chat(output.logprobs),
                    "finish_reason": finish_reason(output, reply),
                }
            )
        return self._body("chatcmpl", "chat.completion", choices)

    def _text_body(self, outputs: list[CompletionOutput], forms: LogprobForms) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": output.text,
                "logprobs": forms.completion(output.logprobs),
                "finish_reason": output.finish_reason,
            }
            for index, output in enumerate(outputs)
        ]
        return self._body("cmpl", "text_completion", choices)

    def _body(self, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": _new_id(prefix),
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }

    def _plain(
        self,
        item: BatchItem,
        outputs: list[CompletionOutput],
        replies: list[Reply],
        usage: dict[str, Any],
        forms: LogprobForms,
    ) -> dict[str, Any]:
        """One answer stands in the record itself, several in its `choices`."""
        answers = []
        for output, reply in zip(outputs, replies, strict=True):
            answer: dict[str, Any] = {"text": reply.content, "finish_reason": finish_reason(output, reply)}
            if reply.reasoning is not None:
                answer["reasoning"] = reply.reasoning
            if reply.calls:
                answer["tool_calls"] = tool_calls(reply)
            if output.logprobs is not None:
                form = forms.chat if item.is_chat else forms.completion
                answer["logprobs"] = form(output.logprobs)
            answers.append(answer)
        record: dict[str, Any] = {"custom_id": item.custom_id}
        record |= answers[0] if item.answers == 1 else {"choices": answers}
        record["usage"] = usage
        if item.metadata is not None:
            record["metadata"] = item.metadata
        return record


@dataclass(frozen=True, slots=True)
class LogprobForms:
    """Log-probabilities in the two forms of OpenAI's API. A token's text is looked up once per answer."""

    text_of: Callable[[int], str]
    _texts: dict[int, str] = field(default_factory=dict)

    def chat(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            self._entry(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top]}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def completion(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        tokens = [self._text(entry.token_id) for entry in logprobs]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                {self._text(token): _finite(logprob) for token, logprob in entry.top} for entry in logprobs
            ],
            "text_offset": offsets[:-1],
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """`bytes` is null for a token that is only a part of a character."""
        text = self._text(token_id)
        return {
            "token": text,
            "logprob": _finite(logprob),
            "bytes": None if "\ufffd" in text else list(text.encode("utf-8")),
        }

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self.text_of(token_id)
        return self._texts[token_id]


def error_fields(error: LineError | RequestError) -> tuple[str, str, str | None]:
    """(code, message, param) of an error record."""
    return error.code, str(error), error.param


def tool_calls(reply: Reply) -> list[dict[str, Any]]:
    return [
        {"id": _new_id("call"), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.calls
    ]


def finish_reason(output: CompletionOutput, reply: Reply) -> str | None:
    """An answer that ended by itself, not at a stop text, ended for the sake of the calls in it."""
    ended = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    return "tool_calls" if reply.calls and ended else output.finish_reason


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _new_id(prefix: str) -> str:
    return f"{prefix}{'_' if prefix in ('batch_req', 'call') else '-'}{uuid.uuid4().hex}"
