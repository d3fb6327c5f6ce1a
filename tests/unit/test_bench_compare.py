"""The comparison's plumbing, on a tiny model: both engines do the whole work, and times are put where they belong."""

from __future__ import annotations

import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

from tiny_models import write_dir  # noqa: E402

from mlxbatch.bench.arrivals import Arrivals  # noqa: E402
from mlxbatch.bench.compare import compare  # noqa: E402
from mlxbatch.bench.contenders import run_mlx_lm, run_ours  # noqa: E402
from mlxbatch.bench.measured import ChatClock, Measured  # noqa: E402
from mlxbatch.bench.workloads import WORKLOADS, Job, Workload  # noqa: E402
from mlxbatch.models import load  # noqa: E402
from mlxbatch.models.loaded import LoadedModel  # noqa: E402


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(write_dir("llama", tmp_path_factory.mktemp("bench") / "llama")))


def small(loaded: LoadedModel) -> Workload:
    vocab = loaded.tokenizer.vocab_size
    batch = [Job(tuple((7 * i + j) % vocab for j in range(5 + i)), 3 + i) for i in range(5)]
    chats = [Job(tuple(range(3, 9)), 4, arrives=0.01 * i, chat=True) for i in range(2)]
    return Workload("small", "", (*batch, *chats), rows=8, in_flight=2)


@pytest.mark.parametrize("run", [run_ours, run_mlx_lm])
def test_both_engines_do_the_whole_work(tiny: LoadedModel, run) -> None:
    measured = run(tiny, small(tiny))
    assert (len(measured.ttft), len(measured.tpot), len(measured.token_gaps)) == (2, 2, 2 * 3)
    assert min(measured.ttft) > 0
    assert 0 < measured.prefill_seconds + measured.decode_seconds <= measured.total
    assert measured.held_over_live >= 1


def test_a_comparison_has_every_figure_of_its_workload(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbatch.bench.compare.WORKLOADS", {"small": lambda vocab: small(tiny)})
    figures = compare(tiny, ["small"], 1)
    assert [figure.name for figure in figures] == ["total", "chat TTFT p99", "chat TPOT p99", "chat token gap p99"]
    assert all(figure.ratio == pytest.approx(figure.ours / figure.mlx_lm) for figure in figures)


def test_a_batch_client_keeps_so_many_jobs_in_flight() -> None:
    jobs = [Job((1,), 1), Job((2,), 1), Job((3,), 1), Job((4,), 1, arrives=5.0, chat=True)]
    arrivals = Arrivals(Workload("", "", tuple(jobs), in_flight=2))
    assert [name for name, _ in arrivals.due(0.0)] == ["0", "1"]
    assert [name for name, _ in arrivals.due(1.0)] == []
    arrivals.finished("1")
    assert [name for name, _ in arrivals.due(5.0)] == ["3", "2"]
    assert not arrivals


def test_times_of_a_chat() -> None:
    measured = Measured()
    clock = ChatClock(measured)
    clock.arrived("a", 1.0)
    for moment in (1.5, 2.0, 3.5):
        clock.token("a", moment)
    clock.close()
    assert (measured.ttft, measured.token_gaps, measured.tpot) == ([0.5], [0.5, 1.5], [1.0])


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_fits_a_small_vocabulary(name: str) -> None:
    workload = WORKLOADS[name](500)
    assert {token for job in workload.jobs for token in job.prompt} <= set(range(500))
    prefix = workload.jobs[0].prompt[: workload.prefix_len]
    assert all(job.prompt[: workload.prefix_len] == prefix for job in workload.jobs)
