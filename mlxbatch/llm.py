"""`LLM`: the engine as a Python object, with the names that vLLM's users know."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from numbers import Integral
from types import TracebackType
from typing import Any, TypeVar, cast

from mlxbatch.config import EngineConfig
from mlxbatch.engine.api import EngineClient, TokenizerLike
from mlxbatch.engine.owner import OwnerThread
from mlxbatch.errors import EngineError, UsageError
from mlxbatch.request import CompletionOutput, OutputDelta, Priority, Request, RequestOutput, SamplingParams
from mlxbatch.settings import ENGINE_SETTINGS, integer

T = TypeVar("T")
Message = dict[str, object]
Prompt = str | Seq[int] | Mapping[str, Any]

_ALIASES = {"enable_prefix_caching": "prefix_caching"}  # vLLM's name -> ours


class LLM:
    """One model and its engine. Use it as a context manager, or drop it: its memory is given back.

    Any number of streams may be read in turn, and any thread may call it: all of them share one batch.
    Keyword arguments are EngineConfig's fields; vLLM's `enable_prefix_caching` and `tensor_parallel_size=1` are
    understood. `in_process=False` joins (or starts) the engine process that terminals share.
    Raises UsageError for an argument that does not exist here, ModelError if the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        tensor_parallel_size: int = 1,
        in_process: bool = True,
        **settings: Any,
    ) -> None:
        if tensor_parallel_size != 1:
            raise UsageError(
                f"tensor_parallel_size={tensor_parallel_size}: one Mac has one GPU. Leave it out "
                "or set it to 1."
            )
        self.config = engine_config(model, settings)
        self._owner = OwnerThread()
        try:
            engine = self._owner.run(_connect, self.config, in_process)
        except BaseException:
            self._owner.end_with(_nothing)
            raise
        self._engine: EngineClient | None = engine
        self._end = weakref.finalize(self, self._owner.end_with, engine.close)  # when dropped, and at exit
        self._polling = threading.Lock()
        self._unread: dict[str, list[OutputDelta]] = {}  # of each request that somebody waits for
        self._ids = itertools.count(1)

    @property
    def engine(self) -> EngineClient:
        if self._engine is None:
            raise UsageError("this LLM is closed")
        return self._engine

    def get_tokenizer(self) -> TokenizerLike:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or many: texts, lists of token ids, or mappings with `prompt` or `prompt_token_ids`.

        Results come in the order of the prompts. Raises RequestError if a prompt can never fit.
        """
        many = _as_list(prompts)
        return self._run(self._on_owner(lambda: [self._encode(prompt) for prompt in many]), sampling_params)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, object] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        if isinstance(messages, (str, Mapping)):
            raise UsageError("chat takes a list of messages, each with a role and a content, or several such lists")
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("list[Seq[Message]]", [messages] if one else list(messages))
        arguments = {**self.config.chat_template_args, **(chat_template_kwargs or {})}
        encode = self.engine.tokenizer.encode_chat

        def encoded() -> list[tuple[None, tuple[int, ...]]]:
            return [(None, tuple(encode([dict(m) for m in chat], **arguments))) for chat in conversations]

        return self._run(self._on_owner(encoded), sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Complete one prompt, token by token. Closing the iterator early cancels the request."""
        text, ids = self._on_owner(lambda: self._encode(prompt))
        request = self._request(text, ids, sampling_params or SamplingParams(), Priority.INTERACTIVE)
        yield from self._deltas([request])

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        self._engine = None
        self._end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_owner(self, function: Callable[[], T]) -> T:
        """`function` on the engine's thread. Raises UsageError when this LLM is closed, be it meanwhile."""
        try:
            return self._owner.run(function)
        except RuntimeError:
            _ = self.engine
            raise

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(self.engine.tokenizer.encode(prompt))
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), tuple(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self._encode(prompt["prompt"])
            raise UsageError("a prompt mapping needs `prompt` or `prompt_token_ids`")
        if isinstance(prompt, Iterable):
            ids = tuple(prompt)
            if all(isinstance(token, Integral) for token in ids):
                return None, tuple(map(int, ids))
        raise UsageError(f"a prompt is a text, a list of token ids, or a mapping with either, not {prompt!r}")

    def _request(
        self, text: str | None, ids: tuple[int, ...], params: SamplingParams, priority: Priority = Priority.BATCH
    ) -> Request:
        return Request(f"llm-{next(self._ids)}", ids, params, priority=priority, prompt=text)

    def _run(
        self,
        prompts: Seq[tuple[str | None, tuple[int, ...]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
            if len(params) != len(prompts):
                raise UsageError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
        requests = [self._request(text, ids, p) for (text, ids), p in zip(prompts, params, strict=True)]
        results = {request.request_id: _empty_output(request) for request in requests}
        for delta in self._deltas(requests):
            _apply(results[delta.request_id], delta)
        return list(results.values())

    def _deltas(self, requests: Seq[Request]) -> Iterator[OutputDelta]:
        """Whatever is added to the answers of `requests` until they are complete; left early, cancels them."""
        engine = self.engine
        mail: list[OutputDelta] = []
        left = sum(request.params.n for request in requests)
        self._unread |= dict.fromkeys((request.request_id for request in requests), mail)
        try:
            self._on_owner(lambda: _submit(engine, requests))
            while left:
                self._poll_into(mail)
                while mail:
                    delta = mail.pop(0)
                    left -= delta.finish_reason is not None
                    yield delta
        finally:
            for request in requests:
                self._unread.pop(request.request_id, None)
                if left and self._engine is engine:
                    self._owner.post(engine.cancel, request.request_id)

    def _poll_into(self, mail: list[OutputDelta]) -> None:
        """Wait for news; those of other readers go to their own mail. Returns when `mail` may have some."""
        with self._polling:
            if mail:  # another reader has put it there
                return
            engine = self.engine
            for delta in self._on_owner(lambda: engine.poll(1.0)):
                self._unread.get(delta.request_id, []).append(delta)
            if not mail and not self._on_owner(lambda: engine.has_unfinished):
                raise EngineError("the engine lost a request")


def _nothing() -> None:
    """The last call of an owner whose engine could not be opened."""


def engine_config(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword arguments, which may be written as on the command line: "auto", "4GB", "50ms".

    Raises UsageError for a name that does not exist and for a value that cannot be read.
    """
    named = {_ALIASES.get(name, name): value for name, value in settings.items()}
    unknown = sorted(set(named) - set(EngineConfig.__dataclass_fields__))
    if unknown:
        known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
        raise UsageError(f"LLM has no argument {', '.join(unknown)}; it knows {known}")
    readers = {setting.name: setting.read for setting in ENGINE_SETTINGS} | {"seed": integer}
    for name, value in {**named, "model": model}.items():
        if value is not None:
            try:
                named[name] = readers[name](os.fspath(value) if isinstance(value, os.PathLike) else value)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from None
    return replace(EngineConfig(), **named)


def _connect(config: EngineConfig, in_process: bool) -> EngineClient:
    if in_process:
        from mlxbatch.engine.local import LocalEngine

        return LocalEngine(config)
    from mlxbatch.process.client import connect

    return connect(config, priority=Priority.BATCH)


def _submit(engine: EngineClient, requests: Seq[Request]) -> None:
    for request in requests:
        engine.submit(request)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UsageError(f"prompts are texts or lists of token ids, not {prompts!r}")
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [cast("list[int]", items)]
    return cast("list[Prompt]", items)


def _empty_output(request: Request) -> RequestOutput:
    want_logprobs = request.params.logprobs is not None
    outputs = [CompletionOutput(index, logprobs=[] if want_logprobs else None) for index in range(request.params.n)]
    return RequestOutput(request.request_id, request.prompt, list(request.prompt_token_ids), outputs)


def _apply(result: RequestOutput, delta: OutputDelta) -> None:
    output = result.outputs[delta.index]
    output.text += delta.text
    output.token_ids += delta.token_ids
    if output.logprobs is not None:
        output.logprobs += delta.logprobs
    if delta.finish_reason is not None:
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        output.error = delta.error
        if delta.index == 0:
            result.num_cached_tokens = delta.num_cached_tokens
