"""What a client asks for, and what it gets back. Pure values: no engine state lives here."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

import msgspec

from mlxbatch.errors import RequestError

FINISH_REASONS = ("stop", "length", "abort", "error")
LEAST_INTEGER, LARGEST_INTEGER = -(2**63), 2**64 - 1  # what a message to the engine process can hold
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LEAST_TEMPERATURE = 1e-5  # below it sampling is greedy, as in vLLM: logits divided by it would overflow


class Priority(enum.IntEnum):
    """Service class. A lower value is served first; interactive requests may preempt batch rows."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names and defaults follow vLLM's class.

    `temperature` 0 is greedy, and so is less than 1e-5. `top_k` of 0 or -1 keeps every token. `logprobs` is
    the number of top log-probabilities to return beside the sampled token's (None: none at all). `max_tokens`
    None means whatever fits the context. `presence_penalty` and `frequency_penalty` count generated tokens,
    `repetition_penalty` prompt and generated tokens.

    Raises RequestError for a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "seed", "logprobs", "max_tokens", "min_tokens"):
            optional = name in ("seed", "logprobs", "max_tokens") and getattr(self, name) is None
            self._check(name, optional or isinstance(getattr(self, name), Integral), "a whole number")
        for name in _REAL:
            self._check(name, isinstance(getattr(self, name), Real), "a number")
        self._check("stop", isinstance(self.stop or (), Iterable), "a non-empty string or a list of them")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        whole = all(isinstance(t, Integral) for t in self.stop_token_ids)
        self._check("stop_token_ids", whole, "a list of token ids")
        biases = all(isinstance(t, Integral) and isinstance(b, Real) for t, b in self.logit_bias.items())
        self._check("logit_bias", biases, "numbers by token id")
        for name in ("n", "top_k", "seed", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            self._check(name, value is None or LEAST_INTEGER <= value <= LARGEST_INTEGER, "a number of 64 bits")
        self._check("n", self.n >= 1, "at least 1")
        self._check("temperature", 0.0 <= self.temperature < float("inf"), "0 or more, and finite")
        self._check("top_k", self.top_k >= -1, "-1 or 0 (off), or at least 1")
        self._check("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        self._check("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        self._check("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "above 0, and finite")
        self._check("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2")
        self._check("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2")
        self._check("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "from 0 to 20")
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        self._check("min_tokens", self.min_tokens >= 0, "0 or more")
        self._check("min_tokens", self.max_tokens is None or self.min_tokens <= self.max_tokens, "at most max_tokens")
        self._check("stop", all(isinstance(s, str) and s for s in self.stop), "a non-empty string or a list of them")
        self._check("stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "a list of token ids")
        self._check("logit_bias", all(-100 <= b <= 100 for b in self.logit_bias.values()), "from -100 to 100 each")

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise RequestError(f"{name} must be {rule}, not {getattr(self, name)!r}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def as_dict(self) -> dict[str, object]:
        """Every field, as plain JSON-able values (used for fingerprints and the wire)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["stop"] = list(self.stop)
        values["stop_token_ids"] = list(self.stop_token_ids)
        values["logit_bias"] = {str(k): v for k, v in self.logit_bias.items()}
        return values


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, tokenized, with its parameters. `arrival` is seconds on the engine's clock.

    `resume_token_ids` are tokens that an earlier engine already generated for output 0: they count as
    output, so a request continues exactly where a crashed engine left it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: Priority = Priority.BATCH
    rank: int = 0  # finer order within a class, lower first
    deadline: float | None = None  # seconds after arrival by which the answer is wanted
    arrival: float = 0.0
    prompt: str | None = None
    resume_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a sampled token and of the likeliest `top` at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class CompletionOutput:
    """One answer (of `n`) to a request. `finish_reason` is None while it runs."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything about one request, as `LLM.generate` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class OutputDelta(msgspec.Struct, frozen=True):
    """What one engine step added to one output of one request. The only thing clients are streamed.

    `text` never ends within a character nor within a possible stop string; the last delta of an output
    carries `finish_reason` and whatever text was held back.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Times of a finished request, seconds on the engine's clock."""

    request_id: str
    arrival: float
    first_scheduled: float
    first_token: float
    finished: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int

    @property
    def queue_time(self) -> float:
        return self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; 0 for a single token."""
        return (self.finished - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
