"""Runs step plans on an unmodified mlx-lm model: flushes, one forward pass, sampling, one `async_eval`."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from mlxbatch.execution.attention.layout import PagedAttention
from mlxbatch.execution.attention.reference import ReferenceAttention
from mlxbatch.execution.forward import ModelForward
from mlxbatch.execution.kv import KVMemory, tail_length
from mlxbatch.execution.modes import profile_model
from mlxbatch.execution.sampling import Sampler, Samples
from mlxbatch.scheduling.plan import GroupSpec, StepPlan, StepResult


class ModelStep:
    """A submitted step: `result()` waits for its samples. Holds nothing lazy."""

    def __init__(self, samples: Samples | None) -> None:
        self._samples = samples

    def result(self) -> StepResult:
        samples, self._samples = self._samples, None
        if samples is None:
            return StepResult([], [], [])
        return samples.read()


class ModelRunner:
    """Implements `Runner` on the device of this machine.

    Steps run in the order of `launch`. Sampled ids stay on the device, where the next step's rows pick them
    up, so a step may be launched before the one before it has been read.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        block_size: int = 16,
        attention: PagedAttention | None = None,
        row_sizes: Sequence[int] = (),
    ) -> None:
        """`attention` defaults to the reference. `row_sizes`, ascending: decode rows are padded up to the next
        of these. Raises ModelError if the model cannot be run."""
        self.profile = profile_model(model, block_size)
        self.kv = KVMemory(self.profile.shapes, self.profile.groups, block_size, tail_length(block_size))
        self._forward = ModelForward(
            model, self.profile, self.kv, attention or ReferenceAttention(), row_sizes
        )
        self._sampler = Sampler()
        self._previous_ids: mx.array | None = None

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return self.profile.groups

    @property
    def block_size(self) -> int:
        return self.kv.block_size

    @property
    def tail_len(self) -> int:
        return self.kv.tail_len

    def launch(self, plan: StepPlan) -> ModelStep:
        """Submit a step to the device and return at once, unless it carries a flush, which waits for the step
        before it."""
        if plan.flush is not None:
            self.kv.flush(plan.flush)
        if not plan.has_rows:
            return ModelStep(None)
        self.kv.drop_pending()
        self.kv.resize_tails(plan.num_slots)
        self._forward.resize(plan.num_slots)
        self._sampler.release(plan.released_slots)
        self._forward.release(plan.released_slots)
        result = self._forward.run(plan, self._previous_ids)
        samples = None
        if result.logits is not None:
            samples = self._sampler.sample(result.logits, plan.samples, result.inputs, result.places)
        if plan.tail_copies:
            sources, targets = zip(*plan.tail_copies, strict=True)
            self.kv.copy_tails(sources, targets)
            self._forward.copy_slots(sources, targets)
        # Everything that the step leaves behind is submitted at once: a lazy array that outlived it would keep
        # reading the pool, and the next flush would copy the pool instead of writing into it.
        outputs = [*self.kv.step_arrays(), *self._forward.states.arrays(), *self._sampler.state_arrays()]
        if samples is not None:
            outputs += samples.arrays()
        mx.async_eval(outputs)
        self._previous_ids = samples.token_ids if samples is not None else None
        return ModelStep(samples)
