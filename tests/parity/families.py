"""Parity of a model family with mlx-lm: every logit of a mixed batch against mlx-lm's own forward pass alone.

Three sequences of known tokens go through the shipped `ModelRunner` in steps that mix prefill chunks and decode
rows, with blocks of 4 in shuffled order, tails, and decode rows padded to fixed sizes. A step's logits are taken
where the sampler would. The same steps with something wrong in them must differ, or the comparison proves nothing.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from metal_only import use_stand_ins
from mlx.utils import tree_map
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm_families import VOCAB, build
from step_driver import GREEDY, DrivenSequence, StepDriver

from mlxbatch.execution.model_runner import ModelRunner, ModelStep
from mlxbatch.execution.modes import ModelProfile, profile_model
from mlxbatch.models.adapters import adapt
from mlxbatch.models.support import check_supported
from mlxbatch.scheduling.plan import BlockTable, KVView, SampleRow, StepPlan

BLOCK_SIZE = 4
TOLERANCE = 1e-4  # of the largest logit
PROMPTS = (21, 9, 13)
LENGTHS = (34, 22, 24)  # tokens of each sequence: prompt and then one decode step for each
_DAMAGED_STEPS = 3
NO_ROWS = mx.zeros((0,), mx.int32)

# Families whose decode with mlx-lm's cache differs from mlx-lm's forward pass without one: compared with the latter.
WITHOUT_CACHE = {"plamo3": "mlx-lm's cache is one position shorter than its window"}

Logits = dict[tuple[int, int], np.ndarray]  # (sequence, position) -> [vocab]
Damage = Callable[[StepPlan], StepPlan]


@dataclass(frozen=True)
class Parity:
    """`error`: largest difference of any logit over the largest logit; `sampled` the same when only the rows that
    an engine would sample reach the head; `controls`: the error that each deliberate mistake gives."""

    mode: str
    kinds: tuple[str, ...]
    error: float
    sampled: float
    controls: dict[str, float]

    @property
    def holds(self) -> bool:
        return max(self.error, self.sampled) <= TOLERANCE and min(self.controls.values()) > 10 * TOLERANCE


def tiny_model(name: str, **changes: Any) -> nn.Module:
    """A family's tiny model in float32. Parameters that start as constants (sinks, router biases, norms) get
    noise, so that they matter."""
    use_stand_ins()
    mx.random.seed(7)
    model = build(name, **changes)
    model.update(tree_map(_noisy_float32, model.parameters()))
    for _, module in model.named_modules():
        if isinstance(module, BitLinear):  # as layers of floats start
            module.weight_scale = mx.array([module.in_features**-0.5])
    model.eval()
    mx.eval(model.parameters())
    return model


def check_family(name: str) -> Parity:
    """Raises ModelError if mlxbatch refuses the family."""
    check_supported(name)
    return check_model(tiny_model(name), cached=name not in WITHOUT_CACHE)


def profile_family(name: str) -> tuple[str, tuple[str, ...]]:
    """Mode and kinds of layers, found without computing anything. Raises ModelError if the family is refused."""
    check_supported(name)
    model = tiny_model(name)
    adapt(model)
    return _described(profile_model(model, BLOCK_SIZE))


def check_model(model: nn.Module, *, cached: bool = True) -> Parity:
    numbers = random.Random(1)
    tokens = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    oracle = _alone(model, tokens) if cached else _alone_at_once(model, tokens)
    adapt(model)
    runner = ModelRunner(model, block_size=BLOCK_SIZE, row_sizes=(4, 8))
    scale = max(float(np.abs(row).max()) for row in oracle.values())

    def error(got: Logits) -> float:
        worst = max(float(np.abs(got[key] - oracle[key]).max()) for key in got)
        return worst / scale if np.isfinite(worst) else float("inf")

    def run(damage: Damage | None = None, every: bool = True) -> Logits:
        again = ModelRunner(model, block_size=BLOCK_SIZE, row_sizes=(4, 8))
        return _batched(again, tokens, damage, every)

    whole = run()
    expected = {(s, p) for s, length in enumerate(LENGTHS) for p in range(length - 1)}
    if set(whole) != expected:
        raise AssertionError("the batched run left positions out")
    mode, kinds = _described(runner.profile)
    return Parity(
        mode=mode,
        kinds=kinds,
        error=error(whole),
        sampled=error(run(every=False)),
        controls={label: error(run(damage)) for label, damage in _controls(runner).items()},
    )


def _described(profile: ModelProfile) -> tuple[str, tuple[str, ...]]:
    """A window's length is the tiny model's own and says nothing of the family."""
    names = [group.name.partition("-")[0] for group in profile.groups]
    kinds = [f"{len(g.layers)} {name}" for g, name in zip(profile.groups, names, strict=True)]
    if profile.states:
        kinds.append(f"{len(profile.states)} recurrent")
    return str(profile.mode), tuple(kinds)


def _noisy_float32(array: mx.array) -> mx.array:
    if array.dtype == mx.uint8:  # four ternary weights in a byte
        return sum(mx.random.randint(0, 3, array.shape) << shift for shift in (0, 2, 4, 6)).astype(mx.uint8)
    if array.dtype == mx.uint32:  # packed weights
        return mx.random.randint(0, 1 << 30, array.shape).astype(mx.uint32)
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    constant = bool((array.max() == array.min()).item())
    return array.astype(mx.float32) + (0.1 * mx.random.normal(array.shape) if constant else 0.0)


def _alone(model: nn.Module, tokens: list[list[int]]) -> Logits:
    """mlx-lm by itself: one sequence at a time, its prompt at once and then token by token."""
    logits: Logits = {}
    for number, (ids, prompt) in enumerate(zip(tokens, PROMPTS, strict=True)):
        cache = make_prompt_cache(model)
        parts = [model(mx.array([ids[:prompt]]), cache=cache)[0]]
        parts += [model(mx.array([[token]]), cache=cache)[0] for token in ids[prompt:-1]]
        for position, row in enumerate(np.array(mx.concatenate(parts).astype(mx.float32))):
            logits[number, position] = row
    return logits


def _alone_at_once(model: nn.Module, tokens: list[list[int]]) -> Logits:
    rows = (np.array(model(mx.array([ids[:-1]]))[0].astype(mx.float32)) for ids in tokens)
    return {(number, position): row for number, own in enumerate(rows) for position, row in enumerate(own)}


def _batched(runner: ModelRunner, tokens: list[list[int]], damage: Damage | None, every: bool) -> Logits:
    recorder = _Recorder(runner, damage, every)
    driver = StepDriver(recorder)  # type: ignore[arg-type]
    a, b, c = (driver.add(ids) for ids in tokens)
    driver.step(chunks=[(a, 10)])
    driver.step(chunks=[(a, 11), (b, 4)])
    driver.step(decode=[a], chunks=[(b, 5), (c, 7)])
    driver.step(decode=[b, a], chunks=[(c, 5)])
    recorder.damaging = True
    driver.step(decode=[a, b], chunks=[(c, 1)])
    left: list[DrivenSequence] = [c, a, b]
    while left := [seq for seq in left if seq.computed < len(seq.tokens) - 1]:
        driver.step(decode=left)
        if damage is not None and recorder.damaged == _DAMAGED_STEPS:
            break
    return recorder.logits


class _Recorder:
    """Between the driver and the runner: asks for a logit of every token (or of each row's last) and keeps them."""

    def __init__(self, runner: ModelRunner, damage: Damage | None, every: bool) -> None:
        self._runner = runner
        self._damage = damage
        self._every = every
        self._sampler = _RecordingSampler()
        runner._sampler = self._sampler  # type: ignore[assignment]
        self.groups, self.block_size, self.tail_len = runner.groups, runner.block_size, runner.tail_len
        self.logits: Logits = {}
        self.damaging = False
        self.damaged = 0

    def launch(self, plan: StepPlan) -> ModelStep:
        where = [(row.seq_id, row.position) for row in plan.decode]
        last = list(range(len(where)))
        for chunk in plan.chunks:
            where += [(chunk.seq_id, chunk.start + i) for i in range(len(chunk.token_ids))]
            last.append(len(where) - 1)
        wanted = range(len(where)) if self._every else last
        slots = {row.seq_id: row.slot for row in (*plan.decode, *plan.chunks)}
        samples = tuple(
            SampleRow(where[i][0], slots[where[i][0]], i, where[i][1] + 1, GREEDY, 0, (), 1, []) for i in wanted
        )
        plan = dataclasses.replace(plan, samples=samples)
        if self._damage is not None and self.damaging:
            plan = self._damage(plan)
            self.damaged += 1
        step = self._runner.launch(plan)
        for i, row in zip(wanted, np.array(self._sampler.taken.astype(mx.float32)), strict=True):
            self.logits[where[i]] = row
        return step


@dataclass
class _NoSamples:
    """Tokens are known beforehand: nothing is sampled."""

    token_ids: mx.array = field(default_factory=lambda: NO_ROWS)

    def arrays(self) -> list[mx.array]:
        return []

    def read(self) -> tuple[list[int], list[bool], list[Any]]:
        return [], [], []


class _RecordingSampler:
    taken: mx.array

    def sample(self, logits: mx.array, *_: Any) -> _NoSamples:
        self.taken = logits
        mx.eval(logits)
        return _NoSamples()

    def release(self, slots: Any) -> None: ...

    def state_arrays(self) -> list[mx.array]:
        return []


def _controls(runner: ModelRunner) -> dict[str, Damage]:
    """Mistakes that must show. A model without attention knows no positions and blocks, only state."""
    if not runner.groups:
        return {"swapped states": _swapped_states, "another's state": _borrowed_state}
    return {"offset by one": _off_by_one, "swapped blocks": _swapped_blocks}


def _off_by_one(plan: StepPlan) -> StepPlan:
    return dataclasses.replace(plan, decode=tuple(row._replace(position=row.position + 1) for row in plan.decode))


def _swapped_states(plan: StepPlan) -> StepPlan:
    slots = [row.slot for row in plan.decode]
    rows = zip(plan.decode, slots[1:] + slots[:1], strict=True)
    return dataclasses.replace(plan, decode=tuple(row._replace(slot=slot) for row, slot in rows))


def _borrowed_state(plan: StepPlan) -> StepPlan:
    first, *rest = plan.decode
    return dataclasses.replace(plan, decode=(first._replace(slot=plan.num_slots - 1), *rest))


def _swapped_blocks(plan: StepPlan) -> StepPlan:
    """The newest blocks of each row are those of another: newest, to lie within any window."""
    views = [row.view for row in plan.decode]
    swapped = [
        KVView(
            own.flushed,
            tuple(
                BlockTable(mine.first, (*mine.ids[:-1], *theirs.ids[-1:]))
                for mine, theirs in zip(own.tables, other.tables, strict=True)
            ),
        )
        for own, other in zip(views, views[1:] + views[:1], strict=True)
    ]
    rows = zip(plan.decode, swapped, strict=True)
    return dataclasses.replace(plan, decode=tuple(row._replace(view=view) for row, view in rows))
