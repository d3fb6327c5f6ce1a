"""What the interface needs of an engine, whoever provides it: the engine process, or a script in a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import EngineError
from mlxbatch.process.answer_format import AnswerFormat
from mlxbatch.process.messages import Submit
from mlxbatch.process.status import LinkStatus
from mlxbatch.request import OutputDelta, RequestTiming

__all__ = ["EngineLink", "LinkEvent", "LinkStatus"]

LinkEvent = OutputDelta | RequestTiming | Snapshot | LinkStatus


class EngineLink(Protocol):
    """One model's engine. Request ids are the caller's own; a Snapshot shows them as `request_key` gives."""

    @property
    def model(self) -> str:
        """The model as it was asked for; the engine's own name of it is in its snapshots."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together; 0 while unknown."""
        ...

    @property
    def answers(self) -> AnswerFormat:
        """How the model marks thinking in its answers."""
        ...

    @property
    def restarts(self) -> int:
        """How often the engine has been started anew under this link."""
        ...

    def request_key(self, request_id: str) -> str:
        """The engine-wide name of one of our requests."""
        ...

    async def start(self) -> None:
        """Join the model's engine, or start it. Raises EngineError or ModelError."""
        ...

    async def submit(self, submit: Submit) -> int:
        """Queue a request; returns the tokens of its prompt. Raises RequestError when it is refused."""
        ...

    async def cancel(self, request_key: str) -> None:
        """End any request of this engine, ours or another client's, by its engine-wide name."""
        ...

    async def count_chat(self, messages: list[dict[str, object]], /) -> int:
        """Tokens of a conversation through the chat template. Raises RequestError."""
        ...

    async def stats(self) -> dict[str, object]: ...

    def events(self) -> AsyncIterator[LinkEvent]:
        """Everything that happens, until the link is closed. Read by one consumer only."""
        ...

    async def close(self) -> None: ...


class EngineHost(Protocol):
    """The machine that engines run on: what can be loaded, and what could make room."""

    def model_choices(self) -> list[tuple[str, str]]:
        """(name, description) of models, running ones first."""
        ...

    def idle_models(self) -> dict[str, str]:
        """Models whose engines nobody uses, with the memory that stopping them frees, as text."""
        ...

    def stop(self, model: str) -> None:
        """Stop an idle engine; blocks until it is gone. Raises EngineError."""
        ...


class NoHost:
    """Nothing else runs or can be chosen."""

    def model_choices(self) -> list[tuple[str, str]]:
        return []

    def idle_models(self) -> dict[str, str]:
        return {}

    def stop(self, model: str) -> None:
        raise EngineError(f"no engine runs for {model}")
