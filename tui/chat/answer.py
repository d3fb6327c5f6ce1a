"""An answer that is being generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from mlxbatch.history.records import AnswerFigures, MessageRecord, Status
from mlxbatch.process.answer_format import AnswerFormat
from mlxbatch.request import OutputDelta, RequestTiming
from mlxbatch.tui.chat.thoughts import Thoughts

Phase = Literal["sending", "waiting", "prefill", "thinking", "decoding", "stopping"]

_STATUS_OF: dict[str, Status] = {"stop": "complete", "length": "length", "abort": "stopped", "error": "error"}
_RATE_SECONDS = 3.0


@dataclass(slots=True)
class Answer:
    """Collects the deltas of one request into its message. `clock` is monotonic seconds."""

    message: MessageRecord
    request_id: str
    clock: Callable[[], float]
    thoughts: Thoughts = field(default_factory=lambda: Thoughts(AnswerFormat()))
    phase: Phase = "sending"
    started: float = 0.0
    first_token_at: float | None = None
    thinking_until: float | None = None
    saved: bool = True  # everything received is in the history file
    _arrivals: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def finished(self) -> bool:
        return self.message.status != "streaming"

    @property
    def output_tokens(self) -> int:
        return self.message.figures.output_tokens or 0

    def tokens_per_second(self) -> float | None:
        """Rate over the last seconds; None before there are two arrivals."""
        if len(self._arrivals) < 2:
            return None
        (first, _), (last, _) = self._arrivals[0], self._arrivals[-1]
        tokens = sum(count for _, count in self._arrivals) - self._arrivals[0][1]
        return tokens / (last - first) if last > first else None

    def thinking_seconds(self) -> float | None:
        if not self.message.reasoning or self.first_token_at is None:
            return None
        end = self.thinking_until if self.thinking_until is not None else self.clock()
        return end - self.first_token_at

    def take(self, delta: OutputDelta) -> None:
        """Add what the engine sent; a finish reason ends the answer."""
        now = self.clock()
        figures = self.message.figures
        if delta.token_ids:
            if self.first_token_at is None:
                self.first_token_at = now
                figures = replace(figures, ttft=now - self.started)
            self._arrivals.append((now, len(delta.token_ids)))
            while now - self._arrivals[0][0] > _RATE_SECONDS and len(self._arrivals) > 2:
                self._arrivals.popleft()
            figures = replace(
                figures,
                output_tokens=(figures.output_tokens or 0) + len(delta.token_ids),
                cached_tokens=delta.num_cached_tokens or figures.cached_tokens,
                tokens_per_second=self.tokens_per_second() or figures.tokens_per_second,
            )
        self.message.figures = figures
        self._add(*self.thoughts.feed(delta.text), len(delta.token_ids))
        if delta.finish_reason is not None:
            self._add(*self.thoughts.close(), 0)
            self.message.status = _STATUS_OF.get(delta.finish_reason, "complete")
            if delta.error:
                self.message.note = delta.error
        self.saved = False

    def prompt_accepted(self, tokens: int) -> None:
        self.message.figures = replace(self.message.figures, prompt_tokens=tokens)
        self.saved = False

    def fail(self, reason: str) -> None:
        self.message.status, self.message.note = "error", reason
        self.saved = False

    def _add(self, thinking: str, text: str, tokens: int) -> None:
        if self.phase != "stopping" and (thinking or text):
            self.phase = "decoding" if text or self.message.content else "thinking"
        if thinking:
            self.message.reasoning += thinking
        if text:
            if self.message.reasoning and self.thinking_until is None:
                self.thinking_until = self.clock()
            self.message.content += text
        if self.message.reasoning:
            figures = self.message.figures
            thought = (figures.reasoning_tokens or 0) + (tokens if not self.message.content else 0)
            self.message.figures = replace(
                figures, reasoning_tokens=thought, reasoning_seconds=self.thinking_seconds()
            )


def timed_figures(figures: AnswerFigures, timing: RequestTiming) -> AnswerFigures:
    """The engine's own measurements in place of ours."""
    return replace(
        figures,
        prompt_tokens=timing.prompt_tokens,
        cached_tokens=timing.cached_tokens,
        output_tokens=timing.output_tokens,
        ttft=timing.ttft,
        tokens_per_second=1 / timing.tpot if timing.tpot > 0 else None,
    )
