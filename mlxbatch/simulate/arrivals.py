"""Requests of a simulation: when they come, and how long they are."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from mlxbatch.errors import UsageError

# ShareGPT as measured by the vLLM paper (Kwon et al., SOSP 2023): mean prompt 161, mean output 338 tokens.
# A log-normal with sigma 1 has a mean of exp(0.5) times its median.
CHAT_PROMPTS = "lognormal:98,1.0"
CHAT_OUTPUTS = "lognormal:245,0.8"


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request: `arrival` in seconds, lengths in tokens, `shared` of the prompt are a common prefix."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    interactive: bool = False
    shared: int = 0


class Lengths(Protocol):
    def draw(self, source: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    value: int

    def draw(self, source: random.Random) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """`median` tokens; `sigma` is the standard deviation of the log. At least 1 token."""

    median: float
    sigma: float

    def draw(self, source: random.Random) -> int:
        return max(1, round(source.lognormvariate(math.log(self.median), self.sigma)))


@dataclass(frozen=True, slots=True)
class Sample:
    values: tuple[int, ...]

    def draw(self, source: random.Random) -> int:
        return source.choice(self.values)


def parse_rate(text: str) -> float:
    """Requests per second in "2/s", "90/m" or "2". Raises UsageError."""
    number, _, unit = text.strip().partition("/")
    seconds = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}.get(unit.strip().lower())
    try:
        rate = float(number)
    except ValueError:
        rate = -1.0
    if seconds is None or not 0.0 < rate < float("inf"):
        raise UsageError(f"{text!r} is not a rate of requests; write it like 2/s or 90/m")
    return rate / seconds


def parse_lengths(text: str) -> Lengths:
    """Token counts from "512", "uniform:10-500", "lognormal:MEDIAN,SIGMA" or a file of one number a line."""
    kind, _, rest = text.partition(":")
    try:
        if text.isdigit():
            return Fixed(_at_least_one(int(text)))
        if kind == "uniform":
            low, high = (int(part) for part in rest.split("-"))
            if low <= high:
                return Uniform(_at_least_one(low), high)
        if kind == "lognormal":
            median, sigma = (float(part) for part in rest.split(","))
            if median > 0 and sigma >= 0:
                return LogNormal(median, sigma)
        if Path(text).is_file():
            return Sample(tuple(_at_least_one(int(line)) for line in Path(text).read_text().split()))
    except ValueError:
        pass
    raise UsageError(
        f"cannot read {text!r} as lengths; write 512, uniform:10-500, lognormal:MEDIAN,SIGMA, "
        "or name a file with one number a line"
    )


def _at_least_one(value: int) -> int:
    if value < 1:
        raise ValueError("a length is at least 1 token")
    return value


def poisson(
    rate: float,
    count: int,
    prompts: Lengths,
    outputs: Lengths,
    *,
    seed: int = 0,
    most: int = 1 << 30,
    interactive_share: float = 0.0,
    shared: int = 0,
) -> list[SimRequest]:
    """`count` requests whose gaps are exponential with mean 1 / rate. Lengths are cut so that prompt and output
    together stay within `most`."""
    source = random.Random(seed)
    requests, moment = [], 0.0
    for _ in range(count):
        moment += source.expovariate(rate)
        prompt = min(prompts.draw(source) + shared, max(1, most - 1))
        output = max(1, min(outputs.draw(source), most - prompt))
        interactive = source.random() < interactive_share
        requests.append(SimRequest(moment, prompt, output, interactive, min(shared, prompt)))
    return requests


_ARRIVAL = ("arrival", "timestamp", "time")
_PROMPT = ("prompt_tokens", "contexttokens", "input_length", "prompt_length")
_OUTPUT = ("output_tokens", "generatedtokens", "output_length")


def read_trace(path: Path, *, most: int = 1 << 30) -> list[SimRequest]:
    """Requests of a JSONL or CSV file with columns like arrival, prompt_tokens, output_tokens.

    The column names of public traces (TIMESTAMP, ContextTokens, GeneratedTokens) are understood; arrivals are
    seconds or timestamps, and count from the first one. Raises UsageError with the line that cannot be read.
    """
    requests = []
    first: float | None = None
    for line, row in _rows(path):
        lower = {str(key).strip().lower(): value for key, value in row.items()}
        try:
            moment = _moment(_pick(lower, _ARRIVAL))
            prompt, output = int(_pick(lower, _PROMPT)), int(_pick(lower, _OUTPUT))
            first = moment if first is None else first
            prompt = min(_at_least_one(prompt), max(1, most - 1))
            interactive = str(lower.get("priority", "")).lower() == "interactive"
            requests.append(SimRequest(moment - first, prompt, max(1, min(output, most - prompt)), interactive))
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(
                f"{path}, line {line}: needs an arrival, prompt tokens and output tokens ({error})"
            ) from error
    if not requests:
        raise UsageError(f"{path} holds no request")
    return sorted(requests, key=lambda r: r.arrival)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    lines = text.splitlines()
    if path.suffix.lower() == ".csv":
        for number, row in enumerate(csv.DictReader(lines), start=2):
            yield number, row
        return
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path}, line {number}: not a JSON object")
            yield number, row


def _pick(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise KeyError(names[0])


def _moment(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return datetime.fromisoformat(str(value)).timestamp()
