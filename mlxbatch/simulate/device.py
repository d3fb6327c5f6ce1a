"""A machine that is not here: the runner's interface over a step-cost model and a virtual clock.

The scheduler, the block pools, the engine's loop and its metrics run on it unchanged. It computes nothing:
every sampled token is the same id, so requests end by max_tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mlxbatch.capacity.cost_model import StepTimes
from mlxbatch.capacity.saturation import padded_rows
from mlxbatch.scheduling.plan import GroupSpec, StepPlan, StepResult

TOKEN = 1  # what every row samples
PADDING_LIMIT = 128  # rows beyond which no cheaper stair is looked for


class VirtualClock:
    """Seconds since the simulation began. Only moves forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass(slots=True)
class SimulatedStep:
    """A step that is done at `finished` on the clock; reading it takes the clock there."""

    clock: VirtualClock
    finished: float
    samples: int

    def result(self) -> StepResult:
        self.clock.advance_to(self.finished)
        return StepResult([TOKEN] * self.samples, [True] * self.samples, [None] * self.samples)


class SimulatedDevice:
    """Runs plans one after another in the time that `times` says.

    `jitter` is the standard deviation of the log of each step's time, for studying a scheduler whose model is
    never quite right. Decode-only steps are padded to a cheaper stair, as the real runner pads them.
    """

    def __init__(
        self,
        times: StepTimes,
        groups: tuple[GroupSpec, ...],
        clock: VirtualClock,
        *,
        block_size: int = 16,
        tail_len: int = 32,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.clock = clock
        self.busy_until = 0.0
        self.steps = 0
        self.most_pool_bytes = 0
        self._times = times
        self._groups = groups
        self._block_size = block_size
        self._tail_len = tail_len
        self._jitter = jitter
        self._random = random.Random(seed)
        self._padded = padded_rows({r: times.seconds(r) for r in range(1, PADDING_LIMIT + 1)})

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return self._groups

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def tail_len(self) -> int:
        return self._tail_len

    def launch(self, plan: StepPlan) -> SimulatedStep:
        if plan.flush is not None:
            held = sum(n * g.bytes_per_block for n, g in zip(plan.flush.num_blocks, self._groups, strict=True))
            self.most_pool_bytes = max(self.most_pool_bytes, held)
        started = max(self.clock.now, self.busy_until)
        seconds = self.seconds(plan)
        if self._jitter:
            seconds *= self._random.lognormvariate(0.0, self._jitter)
        self.busy_until = started + seconds
        self.steps += 1
        return SimulatedStep(self.clock, self.busy_until, len(plan.samples))

    def seconds(self, plan: StepPlan) -> float:
        """The time of a plan by the model, without jitter."""
        rows, tokens = len(plan.decode), plan.num_chunk_tokens
        context = sum(row.position for row in plan.decode)
        if not tokens:
            padded = self._padded.get(rows, rows)
            return self._times.seconds(padded, 0, context / padded) if rows else 0.0
        seen = sum((c.start + len(c.token_ids) / 2) * len(c.token_ids) for c in plan.chunks) / tokens
        return self._times.seconds(rows, tokens, context / rows if rows else 0.0, prefill_context=seen)
