"""Recurrent state of running sequences: fixed-size arrays per layer, one row for each slot, the last scratch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from mlxbatch.execution.arrays import with_rows
from mlxbatch.execution.modes import StateShape


class RecurrentStates:
    """Hands the states of a step's rows to the model as mlx-lm's own `ArraysCache` and takes them back."""

    def __init__(self, shapes: Sequence[Sequence[StateShape | None]]) -> None:
        self._shapes = tuple(tuple(layer) for layer in shapes)
        self._arrays = [self._zeros(layer, 1) for layer in self._shapes]

    @staticmethod
    def _zeros(layer: Sequence[StateShape | None], count: int) -> list[mx.array | None]:
        return [None if s is None else mx.zeros((count, *s.shape), s.dtype) for s in layer]

    @property
    def num_slots(self) -> int:
        return next((int(a.shape[0]) for layer in self._arrays for a in layer if a is not None), 1) - 1

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays())

    def arrays(self) -> list[mx.array]:
        return [array for layer in self._arrays for array in layer if array is not None]

    def resize(self, num_slots: int) -> None:
        """Keep the slots below `num_slots`; new ones start as zeros."""
        kept = min(num_slots, self.num_slots)
        if num_slots == self.num_slots:
            return
        for layer, shapes in zip(self._arrays, self._shapes, strict=True):
            fresh = self._zeros(shapes, num_slots + 1 - kept)
            layer[:] = [
                None if old is None or new is None else mx.concatenate([old[:kept], new])
                for old, new in zip(layer, fresh, strict=True)
            ]

    def fetch(self, layer: int, slots: mx.array) -> ArraysCache:
        """The states of `slots` (int32 [rows]) as the model's cache object."""
        cache = ArraysCache(len(self._shapes[layer]))
        cache.cache = [None if array is None else array[slots] for array in self._arrays[layer]]
        return cache

    def fresh(self, layer: int) -> ArraysCache:
        """The state before the first token, which mlx-lm's models make themselves."""
        return ArraysCache(len(self._shapes[layer]))

    def store(self, layer: int, slots: mx.array, cache: ArraysCache) -> None:
        """Put back what the model left in a cache object."""
        arrays = self._arrays[layer]
        for index, (array, state) in enumerate(zip(arrays, cache.cache, strict=True)):
            if array is not None and state is not None:
                arrays[index] = with_rows(array, slots, state)

    def reset(self, slots: Sequence[int]) -> None:
        """Zero the states of `slots`. Some may be gone: their rows were preempted before the step began."""
        slots = [slot for slot in slots if slot < self.num_slots]
        if not slots or not self._arrays:
            return
        index = mx.array(slots)
        for arrays in self._arrays:
            arrays[:] = [
                None if a is None else with_rows(a, index, mx.zeros((len(slots), *a.shape[1:]), a.dtype))
                for a in arrays
            ]

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slots `targets` become copies of `sources`."""
        source_slots, target_slots = mx.array(list(sources)), mx.array(list(targets))
        for arrays in self._arrays:
            arrays[:] = [None if a is None else with_rows(a, target_slots, a[source_slots]) for a in arrays]
