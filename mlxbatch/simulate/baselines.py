"""How others batch, on the same machine: whole batches at a time, and prefill of whole prompts."""

from __future__ import annotations

from collections.abc import Sequence

from mlxbatch.capacity.cost_model import StepTimes
from mlxbatch.engine.metrics import Targets
from mlxbatch.request import RequestTiming
from mlxbatch.simulate.arrivals import SimRequest
from mlxbatch.simulate.machine import Machine, Setup, simulate
from mlxbatch.simulate.outcome import Outcome, RowTime, outcome


def _run_batch(
    times: StepTimes, batch: Sequence[tuple[int, SimRequest]], rows: int, began: float, used: RowTime
) -> tuple[float, list[RequestTiming]]:
    """Prefill `batch` padded to its longest prompt, then decode `rows` rows until its longest answer is done.

    Rows that have ended, or were never filled, are padding and cost as much. Tokens are streamed. Returns the
    moment at which the machine is free again, and the timings.
    """
    longest = max(r.prompt_tokens for _, r in batch)
    moment = began + times.seconds(0, rows * longest, prefill_context=longest / 2)
    first = moment
    ends: dict[int, list[tuple[int, SimRequest]]] = {}
    for number, request in batch:
        ends.setdefault(request.output_tokens, []).append((number, request))
    timings: list[RequestTiming] = []
    running = len(batch)
    used.add(running, first - began)
    for count in range(1, max(ends) + 1):
        if count > 1:
            seconds = times.seconds(rows, 0, longest + count - 1)
            moment += seconds
            used.add(running, seconds)
        for number, request in ends.get(count, ()):
            running -= 1
            timings.append(
                RequestTiming(
                    request_id=str(number),
                    arrival=request.arrival,
                    first_scheduled=began,
                    first_token=first,
                    finished=moment,
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.output_tokens,
                    cached_tokens=0,
                    preemptions=0,
                )
            )
    return moment, timings


def static_batching(machine: Machine, requests: Sequence[SimRequest], targets: Targets, *, rows: int) -> Outcome:
    """Wait for `rows` requests, run them as one batch, and only then look at the queue again. The last batch
    goes with what is there."""
    return _batches(machine, requests, targets, rows=rows, window=float("inf"), method="static")


def dynamic_batching(
    machine: Machine, requests: Sequence[SimRequest], targets: Targets, *, rows: int, window: float = 0.1
) -> Outcome:
    """Run a batch when `rows` requests wait, or when the first of them has waited `window` seconds. The batch
    has as many rows as requests."""
    return _batches(machine, requests, targets, rows=rows, window=window, method="dynamic")


def _batches(
    machine: Machine, requests: Sequence[SimRequest], targets: Targets, *, rows: int, window: float, method: str
) -> Outcome:
    timings: list[RequestTiming] = []
    used = RowTime()
    free, following = 0.0, 0
    while following < len(requests):
        first = requests[following].arrival
        full = following + rows - 1
        filled = requests[full].arrival if full < len(requests) else requests[-1].arrival
        began = max(free, min(filled, first + window))
        batch: list[tuple[int, SimRequest]] = []
        while following < len(requests) and len(batch) < rows and requests[following].arrival <= began:
            batch.append((following, requests[following]))
            following += 1
        size = rows if window == float("inf") else len(batch)
        free, finished = _run_batch(machine.times, batch, size, began, used)
        timings += finished
    return outcome(method, timings, used, rows_allowed=rows, targets=targets)


def whole_prompts(
    machine: Machine, requests: Sequence[SimRequest], targets: Targets, *, rows: int, seed: int = 0
) -> Outcome:
    """Iteration-level scheduling that prefills every new prompt whole, beside the running decodes: the shipped
    scheduler with a token budget that never splits a prompt."""
    budget = machine.max_model_len + rows
    setup = Setup(max_num_seqs=rows, max_num_batched_tokens=budget, seed=seed)
    return simulate(machine, setup, requests, targets, method="whole prompts")
