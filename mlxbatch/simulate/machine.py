"""A simulated machine with a model loaded: the shipped scheduler, pools and metrics on a SimulatedDevice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxbatch.capacity.cost_model import StepTimes
from mlxbatch.capacity.kv_bytes import KVFormat, tail_length
from mlxbatch.capacity.model_shape import ModelShape
from mlxbatch.engine.metrics import EngineMetrics, KVUse, Targets
from mlxbatch.errors import EngineError, UsageError
from mlxbatch.request import Priority, Request, RequestTiming, SamplingParams
from mlxbatch.scheduling.budget import PrefillBudget
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec, StepPlan
from mlxbatch.scheduling.policy import Policy
from mlxbatch.scheduling.scheduler import Scheduler
from mlxbatch.scheduling.sequence import Sequence as Answer
from mlxbatch.simulate.arrivals import SimRequest
from mlxbatch.simulate.device import SimulatedDevice, SimulatedStep, VirtualClock
from mlxbatch.simulate.outcome import Outcome, RowTime, outcome
from mlxbatch.units import format_bytes

PREFIX_TOKEN = 2
FIRST_OWN_TOKEN = 3
MAX_STUCK = 3  # plans in a row that start nothing


def group_specs(shape: ModelShape, fmt: KVFormat) -> tuple[GroupSpec, ...]:
    """The model's KV groups: full attention, latent attention, and each window size."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    bytes_each: dict[tuple[str, int | None], int] = {}
    for index, layer in enumerate(shape.layers):
        attention = layer.attention
        if attention is None or not attention.stores_kv:
            continue
        key = ("latent" if attention.kind == "latent" else "full", attention.window)
        kinds.setdefault(key, []).append(index)
        bytes_each[key] = bytes_each.get(key, 0) + fmt.block_bytes(attention)
    return tuple(
        GroupSpec(kind if window is None else f"window {window}", tuple(layers), window, bytes_each[kind, window])
        for (kind, window), layers in kinds.items()
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What stays the same while loads and policies change. `kv_budget` is bytes for block pools."""

    shape: ModelShape
    times: StepTimes
    kv_budget: int
    max_model_len: int
    fmt: KVFormat = field(default_factory=KVFormat)


@dataclass(frozen=True, slots=True)
class Setup:
    """How the scheduler is set up for one run."""

    max_num_seqs: int
    max_num_batched_tokens: int = 512
    policy: Policy | None = None
    prefill_budget: PrefillBudget | None = None
    prefix_caching: bool = False
    run_ahead: bool = True
    jitter: float = 0.0
    seed: int = 0


class Simulation:
    """One run. Ends when every request has finished."""

    def __init__(self, machine: Machine, setup: Setup) -> None:
        block_size = machine.fmt.block_size
        specs = group_specs(machine.shape, machine.fmt)
        if not specs:
            raise UsageError(f"{machine.shape.name} has no attention layer, so there is no KV memory to simulate")
        self.clock = VirtualClock()
        self.device = SimulatedDevice(
            machine.times,
            specs,
            self.clock,
            block_size=block_size,
            tail_len=tail_length(block_size),
            jitter=setup.jitter,
            seed=setup.seed,
        )
        kv = KVMemory(specs, block_size, machine.kv_budget, prefix_caching=setup.prefix_caching)
        least = kv.bytes_alone(block_size)
        if machine.kv_budget < least:
            raise UsageError(
                f"{format_bytes(machine.kv_budget)} of KV memory hold not even one block of each layer "
                f"({format_bytes(least)})"
            )
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=machine.max_model_len,
            tail_len=self.device.tail_len,
            policy=setup.policy,
            prefill_budget=setup.prefill_budget,
            seed=setup.seed,
        )
        self.metrics = EngineMetrics(started=0.0)
        self.rows = RowTime()
        self._run_ahead = setup.run_ahead
        self._in_flight: tuple[StepPlan, SimulatedStep, float] | None = None
        self._last_read = 0.0
        self._stuck = 0

    def run(self, requests: Sequence[SimRequest]) -> list[RequestTiming]:
        """Submit each request when its time has come; returns the timings in the order of finishing."""
        timings: list[RequestTiming] = []
        clock, scheduler = self.clock, self.scheduler
        following = 0
        while following < len(requests) or scheduler.num_unfinished:
            if not scheduler.num_unfinished:
                self._settle()
                clock.advance_to(requests[following].arrival)
            while following < len(requests) and requests[following].arrival <= clock.now:
                scheduler.add(engine_request(requests[following], following))
                following += 1
            timings += self.iterate()
        self._settle()
        return timings

    def iterate(self) -> list[RequestTiming]:
        """Plan and launch a step, read the one before (or, without run-ahead, the same one), as the engine does."""
        if self._in_flight is not None and self.scheduler.reads_first:
            ready, self._in_flight = self._in_flight, None
            return self._read(*ready)
        plan = self.scheduler.plan(self.clock.now)
        launched = None
        if plan is not None:
            self.metrics.on_plan(plan, self._kv_use())
            step = self.device.launch(plan)
            launched = (plan, step, self.clock.now) if plan.has_rows else None
        due = launched
        if self._run_ahead:
            due, self._in_flight = self._in_flight, launched
        if due is not None:
            self._stuck = 0
            return self._read(*due)
        self._stuck = self._stuck + 1 if plan is None and len(self.scheduler.waiting) else 0
        if self._stuck > MAX_STUCK:
            raise EngineError(f"no request can make progress: {self.scheduler.wait_reason}")
        return []

    def _read(self, plan: StepPlan, step: SimulatedStep, launched: float) -> list[RequestTiming]:
        result = step.result()
        now = self.clock.now
        seconds = now - max(launched, self._last_read)
        self._last_read = now
        sampled = self.scheduler.commit(plan, result, now)
        self.metrics.on_step(plan, seconds, now, 0)
        self.rows.add(len(plan.decode) + len(plan.chunks), seconds)
        timings = [_timing(item.seq) for item in sampled if item.seq.finish_reason is not None]
        for timing in timings:
            self.metrics.on_timing(timing)
        return timings

    def _settle(self) -> None:
        """Nothing is left to answer: read what is in flight, and give back slots and blocks."""
        while self.scheduler.has_work or self._in_flight is not None:
            self.iterate()

    def _kv_use(self) -> KVUse:
        pools = self.scheduler.kv.pools
        return KVUse(sum(p.num_used for p in pools), sum(p.num_cached for p in pools), 0, 0, 0, 0)


def _timing(seq: Answer) -> RequestTiming:
    """The timing of a finished answer, as the engine reports it."""
    if seq.first_scheduled is None or seq.first_token is None or seq.finished_at is None:
        raise EngineError(f"request {seq.request.request_id} ended without a token")
    return RequestTiming(
        request_id=seq.request.request_id,
        arrival=seq.request.arrival,
        first_scheduled=seq.first_scheduled,
        first_token=seq.first_token,
        finished=seq.finished_at,
        prompt_tokens=seq.num_prompt_tokens,
        output_tokens=seq.num_output_tokens,
        cached_tokens=seq.num_cached,
        preemptions=seq.num_preemptions,
    )


def engine_request(request: SimRequest, number: int) -> Request:
    """Token ids are the request's number, so that no two prompts share more than their common prefix."""
    own = (FIRST_OWN_TOKEN + number,) * (request.prompt_tokens - request.shared)
    return Request(
        request_id=str(number),
        prompt_token_ids=(PREFIX_TOKEN,) * request.shared + own,
        params=SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0),
        priority=Priority.INTERACTIVE if request.interactive else Priority.BATCH,
        arrival=request.arrival,
    )


def simulate(
    machine: Machine, setup: Setup, requests: Sequence[SimRequest], targets: Targets, *, method: str = "mlxbatch"
) -> Outcome:
    """Run `requests` through the shipped scheduler on the machine."""
    simulation = Simulation(machine, setup)
    timings = simulation.run(requests)
    return outcome(
        method,
        timings,
        simulation.rows,
        rows_allowed=setup.max_num_seqs,
        targets=targets,
        off_target_steps=simulation.metrics.off_target_steps,
    )
