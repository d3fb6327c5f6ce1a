"""What every front end talks to, whether the engine runs in this process or in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mlxbatch.request import OutputDelta, Request, RequestTiming


class StreamDecoder(Protocol):
    """Turns one output's ids into text as they come. All pieces joined are `decode` of all ids."""

    def push(self, token_id: int) -> str:
        """The text that this token completes: often empty, never half a character."""
        ...

    def finish(self) -> str:
        """What was held back, at the end of the output."""
        ...


class TokenizerLike(Protocol):
    """The part of a tokenizer that requests need. `models/tokenizer.py` makes one for every model."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of plain text; BOS exactly once where the model wants it, never doubled."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...
    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder: ...
    def encode_chat(self, messages: list[dict[str, object]], /, **template_args: object) -> list[int]:
        """Ids of a conversation through the chat template, generation prompt added.

        Raises RequestError when the model has no chat template or the template refuses the messages."""
        ...


class EngineClient(Protocol):
    """Submit requests, cancel them, read what they produced. Not thread safe."""

    @property
    def model_name(self) -> str: ...
    @property
    def model_fingerprint(self) -> str:
        """The same as long as the model's files are."""
        ...

    @property
    def max_model_len(self) -> int: ...
    @property
    def tokenizer(self) -> TokenizerLike: ...

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError at once, with the arithmetic, if it can never fit."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request with finish_reason "abort"; unknown or finished ids are ignored."""
        ...

    def poll(self, timeout: float = 0.0) -> list[OutputDelta]:
        """What happened since the last call. In process this runs one step (and ignores the timeout);
        from another process it waits up to `timeout` seconds. Empty when nothing is unfinished."""
        ...

    @property
    def has_unfinished(self) -> bool: ...

    def pop_timings(self) -> list[RequestTiming]:
        """Timings of requests finished since the last call."""
        ...

    def stats(self) -> dict[str, object]:
        """The engine's counters as plain JSON-able values; see engine/metrics.py for their meaning."""
        ...

    def report_progress(self, done: int, total: int) -> None:
        """Say how much of its work this client has done, to those who look at the engine. It may be called often."""
        ...

    def write_trace(self, path: Path) -> None:
        """Write every step so far as a Chrome trace. Raises EngineError if the engine keeps none."""
        ...

    def close(self) -> None: ...
