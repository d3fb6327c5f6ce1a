"""A study: the same load over several rates or row limits, by us and by the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mlxbatch.capacity.cost_model import StepCostModel
from mlxbatch.capacity.latency_budget import LatencyBudget
from mlxbatch.engine.metrics import Targets
from mlxbatch.scheduling.policy import make_policy
from mlxbatch.simulate.arrivals import SimRequest
from mlxbatch.simulate.baselines import dynamic_batching, static_batching, whole_prompts
from mlxbatch.simulate.machine import Machine, Setup, simulate
from mlxbatch.simulate.outcome import Outcome

# Whole batches, whole batches with a waiting window, iteration-level with whole-prompt prefill, and ours.
METHODS = ("static", "dynamic", "whole prompts", "mlxbatch")


@dataclass(frozen=True, slots=True)
class Study:
    """What all runs share. With `keep_targets` our scheduler sizes its prefill chunks by the latency targets."""

    machine: Machine
    targets: Targets
    policy: str = "fcfs"
    max_num_batched_tokens: int = 512
    keep_targets: bool = True
    prefix_caching: bool = False
    window: float = 0.1
    jitter: float = 0.0
    seed: int = 0

    def run(self, method: str, requests: Sequence[SimRequest], rows: int) -> Outcome:
        machine, targets = self.machine, self.targets
        if method == "static":
            return static_batching(machine, requests, targets, rows=rows)
        if method == "dynamic":
            return dynamic_batching(machine, requests, targets, rows=rows, window=self.window)
        if method == "whole prompts":
            return whole_prompts(machine, requests, targets, rows=rows, seed=self.seed)
        budget = None
        if self.keep_targets:
            budget = LatencyBudget(
                StepCostModel(machine.times, source="simulated"),
                tpot_target=targets.tpot,
                ttft_target=targets.ttft,
                block_size=machine.fmt.block_size,
            )
        setup = Setup(
            max_num_seqs=rows,
            max_num_batched_tokens=max(self.max_num_batched_tokens, rows + machine.fmt.block_size),
            policy=make_policy(self.policy),
            prefill_budget=budget,
            prefix_caching=self.prefix_caching,
            jitter=self.jitter,
            seed=self.seed,
        )
        return simulate(machine, setup, requests, targets)


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a study. `rate` is requests per second, None for a trace."""

    rate: float | None
    rows: int
    outcome: Outcome


def run_study(
    study: Study,
    loads: Sequence[tuple[float | None, Sequence[SimRequest]]],
    rows: Sequence[int],
    methods: Sequence[str] = ("mlxbatch",),
    *,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Point]:
    """Every load with every number of rows by every method, one after another."""
    for rate, requests in loads:
        for count in rows:
            for method in methods:
                at = "trace" if rate is None else f"{rate:g}/s"
                progress(f"{method}, {at}, {count} rows, {len(requests)} requests")
                yield Point(rate, count, study.run(method, requests, count))
