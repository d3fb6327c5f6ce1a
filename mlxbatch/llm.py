"""`LLM`: the engine as a Python object, with the names that vLLM's users know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from mlxbatch.config import EngineConfig
from mlxbatch.engine.api import EngineClient, TokenizerLike
from mlxbatch.errors import UsageError
from mlxbatch.request import CompletionOutput, OutputDelta, Priority, Request, RequestOutput, SamplingParams

Message = dict[str, object]
Prompt = str | Seq[int] | Mapping[str, Any]

_ALIASES = {"enable_prefix_caching": "prefix_caching"}  # vLLM's name -> ours


class LLM:
    """One model and its engine. Use it as a context manager, or drop it: its memory is given back.

    Keyword arguments are EngineConfig's fields; vLLM's `enable_prefix_caching` and `tensor_parallel_size=1` are
    understood. `in_process=False` joins (or starts) the engine process that terminals share.
    Raises UsageError for an argument that does not exist here, ModelError if the model cannot be loaded.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
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
        self._engine: EngineClient | None = _connect(self.config, in_process=in_process)
        self._next_id = 0

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
        return self._run([self._encode(prompt) for prompt in many], sampling_params)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, object] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("list[Seq[Message]]", [messages] if one else list(messages))
        arguments = {**self.config.chat_template_args, **(chat_template_kwargs or {})}
        encode = self.engine.tokenizer.encode_chat
        prompts = [(None, tuple(encode([dict(m) for m in chat], **arguments))) for chat in conversations]
        return self._run(prompts, sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Complete one prompt, token by token. Closing the iterator early cancels the request."""
        text, ids = self._encode(prompt)
        request = self._request(text, ids, sampling_params or SamplingParams(), Priority.INTERACTIVE)
        engine = self.engine
        engine.submit(request)
        left = request.params.n
        try:
            while left:
                for delta in engine.poll(timeout=1.0):
                    if delta.request_id == request.request_id:
                        left -= delta.finish_reason is not None
                        yield delta
        finally:
            if left:
                engine.cancel(request.request_id)

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is not None:
            engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(self.engine.tokenizer.encode(prompt))
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), tuple(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self._encode(prompt["prompt"])
            raise UsageError("a prompt mapping needs `prompt` or `prompt_token_ids`")
        return None, tuple(prompt)

    def _request(
        self, text: str | None, ids: tuple[int, ...], params: SamplingParams, priority: Priority = Priority.BATCH
    ) -> Request:
        self._next_id += 1
        return Request(f"llm-{self._next_id}", ids, params, priority=priority, prompt=text)

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
        engine = self.engine
        try:
            for request in requests:
                engine.submit(request)
            unfinished = sum(request.params.n for request in requests)
            while unfinished:
                for delta in engine.poll(timeout=1.0):
                    result = results.get(delta.request_id)
                    if result is not None:
                        _apply(result, delta)
                        unfinished -= delta.finish_reason is not None
        except BaseException:
            for request in requests:
                engine.cancel(request.request_id)
            raise
        return list(results.values())


def engine_config(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword arguments; raises UsageError for a name that does not exist."""
    named = {_ALIASES.get(name, name): value for name, value in settings.items()}
    unknown = sorted(set(named) - set(EngineConfig.__dataclass_fields__))
    if unknown:
        known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
        raise UsageError(f"LLM has no argument {', '.join(unknown)}; it knows {known}")
    return replace(EngineConfig(), model=model, **named)


def _connect(config: EngineConfig, *, in_process: bool) -> EngineClient:
    if in_process:
        from mlxbatch.engine.local import LocalEngine

        return LocalEngine(config)
    from mlxbatch.process.client import connect

    return connect(config, priority=Priority.BATCH)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
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
