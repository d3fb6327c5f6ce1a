"""What a configuration leaves open, decided for this model and machine: rows, targets, policy, and the cost model."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlxbatch.capacity.calibration import FITTED
from mlxbatch.capacity.chat_budget import ChatBudget
from mlxbatch.capacity.chips import Chip
from mlxbatch.capacity.cost_model import GuessedTimes, StepCostModel, StepTimes
from mlxbatch.capacity.latency_budget import LatencyBudget
from mlxbatch.capacity.measured_curve import MeasuredCurve, MeasuredTimes
from mlxbatch.capacity.model_shape import ModelShape
from mlxbatch.capacity.roofline import Roofline
from mlxbatch.capacity.rows_plan import SHOWN_ROWS, auto_rows
from mlxbatch.capacity.saturation import fit_saturation, padded_rows
from mlxbatch.config import EngineConfig
from mlxbatch.engine.snapshot import EffCurve, EffPoint
from mlxbatch.scheduling.budget import PrefillBudget, WholeStep
from mlxbatch.scheduling.plan import StepPlan
from mlxbatch.scheduling.policy import Policy, make_policy

SHOWN_CONTEXT = 1024  # cached tokens of each row on a predicted curve
MOST_ROWS = 256

# What a mode sets, where the user left EngineConfig's default. Interactive: small batches and short steps;
# throughput: large stable ones, and no chunk made smaller for a chat.
MODES: Mapping[str, Mapping[str, object]] = {
    "balanced": {},
    "interactive": {"max_num_batched_tokens": 256, "tpot_target": 0.05, "ttft_target": 1.0},
    "throughput": {"max_num_batched_tokens": 2048},
}


def with_mode(config: EngineConfig) -> EngineConfig:
    """The configuration with its mode's presets; values that differ from the defaults stay."""
    defaults = EngineConfig()
    presets = {
        name: value
        for name, value in MODES[config.mode].items()
        if getattr(config, name) == getattr(defaults, name)
    }
    if "max_num_batched_tokens" in presets:
        least = config.max_num_seqs + config.block_size
        presets["max_num_batched_tokens"] = max(least, int(str(presets["max_num_batched_tokens"])))
    return replace(config, **presets)  # type: ignore[arg-type]


def machine_key(chip: Chip | None) -> str:
    """The name under which curves of this machine are kept."""
    if chip is not None:
        return chip.key
    return f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cpu".lower()


def model_key(name: str, fingerprint: str, dtype: str) -> str:
    """The name under which curves of a model are kept: its content counts, not where it came from."""
    return f"{name.rsplit('/', 1)[-1]}-{dtype}-{fingerprint[:12]}"


@dataclass(slots=True)
class Tuning:
    """Decisions for one engine. `row_sizes` are the row counts that decode steps are padded up to (none: no
    padding); they come from a measured curve only."""

    config: EngineConfig
    rows: int
    reason: str
    cost: StepCostModel
    policy: Policy
    prefill_budget: PrefillBudget
    row_sizes: tuple[int, ...]
    eff: EffCurve

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Correct the cost model by a step that was run."""
        rows, tokens = len(plan.decode), plan.num_chunk_tokens
        context = sum(row.position for row in plan.decode) / rows if rows else 0.0
        seen = None
        if tokens:
            seen = sum((c.start + len(c.token_ids) / 2) * len(c.token_ids) for c in plan.chunks) / tokens
        self.cost.observe(rows, tokens, context, seconds, prefill_context=seen)

    def curve(self) -> EffCurve:
        return self.eff


def tune_for(
    config: EngineConfig,
    *,
    shape: ModelShape | None,
    chip: Chip | None,
    dtype_bytes: int,
    curve: MeasuredCurve | None = None,
) -> Tuning:
    """Decide. A measured curve goes before the chip table, an explicit setting before both."""
    config = with_mode(config)
    times: StepTimes = GuessedTimes()
    source = "guess"
    if curve is not None:
        times, source = MeasuredTimes(curve), "tuned"
    elif chip is not None and shape is not None:
        times, source = Roofline(shape, chip, FITTED, dtype_bytes=dtype_bytes), "chip table"
    most = min(MOST_ROWS, config.max_num_batched_tokens - config.block_size)
    if config.max_num_seqs:
        rows, reason = config.max_num_seqs, "set by the user"
    else:
        cap = auto_rows(
            chip,
            moe=shape is not None and shape.is_moe,
            curve=curve,
            times=times if source == "chip table" else None,
            tpot_target=config.tpot_target,
            context=SHOWN_CONTEXT,
            most=most,
        )
        rows, reason = cap.rows, cap.reason
    cost = StepCostModel(times, source=source)
    budget: PrefillBudget = WholeStep()
    if config.tpot_target is not None:
        budget = LatencyBudget(
            cost, tpot_target=config.tpot_target, ttft_target=config.ttft_target, block_size=config.block_size
        )
    elif config.mode != "throughput":
        budget = ChatBudget(cost, block_size=config.block_size)
    sizes: tuple[int, ...] = ()
    if config.deterministic:
        sizes = (rows,)
    elif curve is not None:
        sizes = _sizes(times, rows)
    eff = _eff(times, source, curve, rows)
    return Tuning(config, rows, reason, cost, make_policy(config.policy), budget, sizes, eff)


def _sizes(times: StepTimes, rows: int) -> tuple[int, ...]:
    """Row counts worth padding up to; empty when every count is best run as it is."""
    padded = padded_rows({r: times.seconds(r) for r in range(1, rows + 1)})
    sizes = tuple(sorted(set(padded.values())))
    return () if len(sizes) == rows else sizes


def _eff(times: StepTimes, source: str, curve: MeasuredCurve | None, rows: int) -> EffCurve:
    """The curve that is shown: measured points, or the chip table's prediction at SHOWN_CONTEXT."""
    if source == "guess":
        return EffCurve(cap=rows)
    if curve is not None:
        seconds = curve.seconds_by_rows()
    else:
        seconds = {r: times.seconds(r, 0, SHOWN_CONTEXT) for r in SHOWN_ROWS}
    one = seconds.get(1)
    if one is None:
        return EffCurve(source=source, cap=rows)
    points = tuple(EffPoint(r, r / t, one / t) for r, t in sorted(seconds.items()))
    return EffCurve(source=source, saturation=fit_saturation(seconds).s, cap=rows, points=points)
