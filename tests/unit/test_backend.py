"""How many threads the BLAS gets. The rest of `prepare_backend` acts once per process, before MLX is imported."""

import os

import pytest

from mlxbatch.execution import backend

VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "KMP_BLOCKTIME")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")  # so that it is restored, whatever the test does
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (8, "7")])
def test_one_core_is_left_to_python(monkeypatch: pytest.MonkeyPatch, cores: int, threads: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    backend._leave_a_core_free()
    assert os.environ["MKL_NUM_THREADS"] == os.environ["OPENBLAS_NUM_THREADS"] == threads
    assert os.environ["KMP_BLOCKTIME"] == "0"


@pytest.mark.parametrize("variable", VARIABLES[:3])
def test_the_users_own_numbers_stand(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "5")
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    backend._leave_a_core_free()
    assert os.environ[variable] == "5"
    assert os.environ["KMP_BLOCKTIME"] == "200"
    assert sum(name in os.environ for name in VARIABLES[:3]) == 1
