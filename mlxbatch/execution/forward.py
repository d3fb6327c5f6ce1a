"""One forward pass of an unmodified model over all tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxbatch.errors import EngineError
from mlxbatch.execution.attention.layout import PagedAttention
from mlxbatch.execution.cache import ForwardInputs, IdleCache, LatentLayerCache, LayerCache
from mlxbatch.execution.heads import select_rows_before_head
from mlxbatch.execution.kv import KVMemory
from mlxbatch.execution.modes import AttentionEntry, CacheEntry, ModelProfile
from mlxbatch.execution.step_inputs import StepInputs
from mlxbatch.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class ForwardResult:
    """Logits [n, vocab] of the plan's n sample rows, in order (None without any). Row i's newest input token is
    `inputs[places[i]]`."""

    logits: mx.array | None
    inputs: mx.array
    places: Sequence[int]


class LayerCaches:
    """Makes the list of cache objects that a model is called with."""

    def __init__(self, profile: ModelProfile, kv: KVMemory, attention: PagedAttention) -> None:
        self._profile = profile
        self._kv = kv
        self._attention = attention
        self._identities: dict[int, mx.array] = {
            entry.layer: mx.eye(shape.v_dim, dtype=shape.v_dtype)[None, None]
            for entry in _attention_entries(profile.entries)
            if entry.latent and entry.layer is not None
            for shape in (profile.shapes[entry.layer],)
        }
        mx.eval(list(self._identities.values()))

    def attention_cache(self, entry: AttentionEntry, inputs: ForwardInputs) -> Any:
        if entry.layer is None:
            return IdleCache(inputs)
        layer, group = self._kv.layers[entry.layer], self._kv.group_of[entry.layer]
        if entry.latent:
            identity = self._identities[entry.layer]
            return LatentLayerCache(layer, group, inputs, self._attention, identity)
        return LayerCache(layer, group, entry.window, inputs, self._attention)


class PackedForward:
    """All tokens of a step, prefill chunks and decode rows alike, as [T, 1]."""

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
        self._caches = LayerCaches(profile, kv, attention)
        self._inputs = StepInputs(len(profile.groups), kv.block_size, kv.tail_len)
        self._selection = select_rows_before_head(model)
        self._row_sizes = tuple(row_sizes)
        self._rows: tuple[tuple[int, ...], mx.array | None] = ((), None)

    def run(self, plan: StepPlan, previous_ids: mx.array | None) -> ForwardResult:
        rows = len(plan.decode)
        padding = next((size - rows for size in self._row_sizes if size >= rows), 0) if rows else 0
        inputs = self._inputs.flat(
            plan.decode,
            plan.chunks,
            previous_ids,
            padding_rows=padding,
            scratch_slot=plan.num_slots,
        )
        places = tuple(
            row.token_index + (padding if row.token_index >= rows else 0) for row in plan.samples
        )
        caches = [self._cache(entry, inputs) for entry in self._profile.entries]
        self._selection.arm(self._selected(places, int(inputs.token_ids.shape[0])))
        logits = self._selection.disarm(self._model(inputs.token_ids, cache=caches))
        return ForwardResult(logits[:, 0] if places else None, inputs.token_ids[:, 0], places)

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept per slot but tails, which are overwritten before they are read."""

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Nothing is kept per slot but tails."""

    def state_arrays(self) -> list[mx.array]:
        return []

    def _cache(self, entry: CacheEntry, inputs: ForwardInputs) -> Any:
        if isinstance(entry, tuple):
            return tuple(self._cache(part, inputs) for part in entry)
        if not isinstance(entry, AttentionEntry):
            raise EngineError("a model with recurrent layers cannot run packed")
        return self._caches.attention_cache(entry, inputs)

    def _selected(self, places: tuple[int, ...], total: int) -> mx.array | None:
        """The rows to compute logits of, on the device; None for all of them in order."""
        if not places or (len(places) == total and places == tuple(range(total))):
            return None
        if self._rows[0] != places:
            self._rows = (places, mx.array(places))
        return self._rows[1]


def _attention_entries(entries: Sequence[CacheEntry]) -> list[AttentionEntry]:
    found: list[AttentionEntry] = []
    for entry in entries:
        if isinstance(entry, tuple):
            found += _attention_entries(entry)
        elif isinstance(entry, AttentionEntry):
            found.append(entry)
    return found
