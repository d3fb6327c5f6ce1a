"""Forward passes of an unmodified model over the tokens of a step: one for all, or one per segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlxbatch.execution.attention.layout import PagedAttention
from mlxbatch.execution.cache import CompositeCache, ForwardInputs, IdleCache, LatentLayerCache, LayerCache
from mlxbatch.execution.heads import select_rows_before_head
from mlxbatch.execution.kv import KVMemory
from mlxbatch.execution.modes import CacheEntry, Mode, ModelProfile, RecurrentEntry
from mlxbatch.execution.recurrent import RecurrentStates
from mlxbatch.execution.step_inputs import StepInputs
from mlxbatch.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """Logits [n, vocab] of the plan's n sample rows, in order (None without any). Row i's newest input token is
    `inputs[places[i]]`."""

    logits: mx.array | None
    inputs: mx.array
    places: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class _StateUse:
    """Which slots' recurrent states a forward pass uses; `fresh`: from before the first token."""

    slots: mx.array
    fresh: bool


class ModelForward:
    """Calls the model for a step, in the way that its profile says.

    Packed: all tokens, prefill chunks and decode rows alike, as [T, 1]. Segmented: decode rows as [R, 1], then
    each chunk as [1, n]; recurrent states are fetched from their slots before and stored after each pass.
    """

    def __init__(
        self,
        model: nn.Module,
        profile: ModelProfile,
        kv: KVMemory,
        attention: PagedAttention,
        row_sizes: Sequence[int],
    ) -> None:
        self._model = model
        self._profile = profile
        self._kv = kv
        self._attention = attention
        self._row_sizes = tuple(row_sizes)
        self._inputs = StepInputs(len(profile.groups), kv.block_size, kv.tail_len)
        self._selection = select_rows_before_head(model)
        self._selected: tuple[tuple[int, ...], mx.array | None] = ((), None)
        self.states = RecurrentStates(profile.states)
        self._identities = {
            entry.layer: mx.eye(shape.v_dim, dtype=shape.v_dtype)[None, None]
            for entry in profile.attention_entries()
            if entry.latent and entry.layer is not None
            for shape in (profile.shapes[entry.layer],)
        }
        mx.eval(list(self._identities.values()), self.states.arrays())

    def run(self, plan: StepPlan, previous_ids: mx.array | None) -> ForwardResult:
        if self._profile.mode is Mode.PACKED:
            return self._run_packed(plan, previous_ids)
        return self._run_segmented(plan, previous_ids)

    def _run_packed(self, plan: StepPlan, previous_ids: mx.array | None) -> ForwardResult:
        rows, padding = len(plan.decode), self._padding(plan)
        inputs = self._inputs.flat(
            plan.decode, plan.chunks, previous_ids, padding_rows=padding, scratch_slot=plan.num_slots
        )
        places = tuple(
            row.token_index + (padding if row.token_index >= rows else 0) for row in plan.samples
        )
        logits = self._call(inputs, places, _StateUse(inputs.slots, fresh=False))
        return ForwardResult(None if logits is None else logits[:, 0], inputs.token_ids[:, 0], places)

    def _run_segmented(self, plan: StepPlan, previous_ids: mx.array | None) -> ForwardResult:
        rows = len(plan.decode)
        order: list[int] = []  # sample rows in the order in which the passes give their logits
        logits: list[mx.array] = []
        token_ids: list[mx.array] = []

        def collect(inputs: ForwardInputs, begin: int, length: int, states: _StateUse) -> None:
            own = [
                index
                for index, row in enumerate(plan.samples)
                if begin <= row.token_index < begin + length
            ]
            found = self._call(inputs, tuple(plan.samples[i].token_index - begin for i in own), states)
            if found is not None:
                order.extend(own)
                logits.append(found.reshape(-1, found.shape[-1]))

        if plan.decode:
            padding = self._padding(plan)
            inputs = self._inputs.flat(
                plan.decode, (), previous_ids, padding_rows=padding, scratch_slot=plan.num_slots
            )
            collect(inputs, 0, rows, _StateUse(inputs.slots, fresh=False))
            token_ids.append(inputs.token_ids[:rows, 0])
        begin = rows
        for chunk in plan.chunks:
            inputs = self._inputs.segment(chunk)
            collect(inputs, begin, len(chunk.token_ids), _StateUse(inputs.slots, fresh=chunk.start == 0))
            token_ids.append(inputs.token_ids[0])
            begin += len(chunk.token_ids)
        joined = None
        if logits:
            joined = mx.concatenate(logits)
            if order != list(range(len(order))):
                joined = joined[mx.array(sorted(range(len(order)), key=order.__getitem__))]
        places = [row.token_index for row in plan.samples]
        return ForwardResult(joined, mx.concatenate(token_ids), places)

    def resize(self, num_slots: int) -> None:
        self.states.resize(num_slots)

    def release(self, slots: Sequence[int]) -> None:
        self.states.reset(slots)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.states.copy(sources, targets)

    def _padding(self, plan: StepPlan) -> int:
        rows = len(plan.decode)
        return next((size - rows for size in self._row_sizes if size >= rows), 0) if rows else 0

    def _call(
        self, inputs: ForwardInputs, places: tuple[int, ...], states: _StateUse
    ) -> mx.array | None:
        """Run the model; logits of the tokens at `places`, or None without any."""
        caches = [self._cache(entry, inputs, states) for entry in self._profile.entries]
        axis = 0 if inputs.flat else 1
        self._selection.arm(self._on_device(places, int(inputs.token_ids.shape[axis])), axis)
        logits = self._selection.disarm(self._model(inputs.token_ids, cache=caches))
        for entry, cache in zip(self._profile.entries, caches, strict=True):
            self._store(entry, cache, states)
        return logits if places else None

    def _cache(self, entry: CacheEntry, inputs: ForwardInputs, states: _StateUse) -> Any:
        if isinstance(entry, tuple):
            return CompositeCache([self._cache(part, inputs, states) for part in entry])
        if isinstance(entry, RecurrentEntry):
            if states.fresh:
                return self.states.fresh(entry.state)
            return self.states.fetch(entry.state, states.slots)
        if entry.layer is None:
            return IdleCache(inputs)
        layer, group = self._kv.layers[entry.layer], self._kv.group_of[entry.layer]
        if entry.latent:
            return LatentLayerCache(layer, group, inputs, self._attention, self._identities[entry.layer])
        return LayerCache(layer, group, entry.window, inputs, self._attention)

    def _store(self, entry: CacheEntry, cache: Any, states: _StateUse) -> None:
        if isinstance(entry, tuple):
            for part, own in zip(entry, cache.caches, strict=True):
                self._store(part, own, states)
        elif isinstance(entry, RecurrentEntry) and isinstance(cache, ArraysCache):
            self.states.store(entry.state, states.slots, cache)

    def _on_device(self, places: tuple[int, ...], total: int) -> mx.array | None:
        """The tokens to compute logits of; None for all of them in order. Kept while they stay the same."""
        if not places or places == tuple(range(total)):
            return None
        if self._selected[0] != places:
            self._selected = (places, mx.array(places))
        return self._selected[1]
