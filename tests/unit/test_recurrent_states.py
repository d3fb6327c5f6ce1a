"""Recurrent state by slot: kept through resizes, zeroed and copied where asked and nowhere else."""

from __future__ import annotations

import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import ArraysCache  # noqa: E402

from mlxbatch.execution.modes import StateShape  # noqa: E402
from mlxbatch.execution.recurrent import RecurrentStates  # noqa: E402


@pytest.fixture
def states() -> RecurrentStates:
    """Four slots; slot i holds i + 1. The layer's second array is one that the model does not use."""
    states = RecurrentStates([[StateShape((2,), mx.float32), None]])
    states.resize(4)
    cache = ArraysCache(2)
    cache.cache = [mx.arange(1.0, 5.0)[:, None] * mx.ones(2), None]
    states.store(0, mx.arange(4), cache)
    return states


def held(states: RecurrentStates) -> list[float]:
    array = states.fetch(0, mx.arange(states.num_slots)).cache[0]
    assert bool((array[:, 0] == array[:, 1]).all())
    return array[:, 0].tolist()


def test_states_are_zeroed_by_slot(states):
    states.reset([1, 3])
    assert held(states) == [1, 0, 3, 0]


def test_a_slot_that_is_gone_is_not_written(states):
    """A row may be admitted and preempted before its step begins, and the arrays shrink for that step."""
    states.resize(2)
    states.reset([1, 3, 1000])
    assert held(states) == [1, 0]
    states.resize(4)
    assert held(states) == [1, 0, 0, 0]


def test_states_are_copied_from_slot_to_slot(states):
    states.copy([0, 2], [2, 3])  # all sources are read before any target is written
    assert held(states) == [1, 2, 1, 3]
    assert states.nbytes == 5 * 2 * 4  # four slots and the scratch one
