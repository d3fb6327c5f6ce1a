"""S and caps of the machines and models that people have expectations of."""

from __future__ import annotations

import pytest

from mlxbatch.capacity.expectations import dense_like_mixtral, findings
from mlxbatch.capacity.known_models import find_shape


def test_dense_models_of_mixtrals_total_and_active_size() -> None:
    mixtral = find_shape("mixtral-8x7b")
    routers = 32 * 8 * 4096
    assert dense_like_mixtral(8).params == mixtral.params - routers
    assert dense_like_mixtral(2).active_params == mixtral.active_params - routers


def test_findings() -> None:
    found = {(f.chip, f.model, f.bits): f for f in findings()}
    assert len(found) == 16
    ultra = found["m2-ultra", "llama-3.1-8b", 4]
    assert (ultra.free_cap, ultra.cap) == (32, 32)
    assert found["m2-ultra", "llama-3.1-8b", 16].free_cap == 64  # a tile of 64 rows: the expectation does not hold
    assert found["a100", "llama-3.1-8b", 16].holds(None)
    for chip in ("m2-ultra", "a100"):
        for bits in (16, 4):
            experts, dense = found[chip, "mixtral-8x7b", bits], found[chip, "dense 13B", bits]
            assert experts.holds(dense.s)
            assert experts.gain < dense.gain
    assert found["m2-ultra", "mixtral-8x7b", 4].cap < found["m2-ultra", "dense 13B", 4].cap
    assert all(f.at_cap == pytest.approx(f.free_cap * f.one / f.gain) for f in found.values())
