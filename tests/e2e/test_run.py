"""`mlxbatch run` from file to file with a real engine and a tiny random model."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

from tiny_models import write_dir  # noqa: E402

from mlxbatch.cli.main import main  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dir("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXBATCH_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.chdir(tmp_path)
    lines: list[dict[str, Any]] = [
        {"id": n, "messages": [{"role": "user", "content": f"Say {n}."}], "max_tokens": 6} for n in range(5)
    ]
    lines += [{"id": "text", "prompt": ["The capital", "of France"], "n": 2, "max_tokens": 4, "ignore_eos": True}]
    lines += [{"id": "probable", "prompt": "One engine", "logprobs": 2, "max_tokens": 3, "ignore_eos": True}]
    lines += [{"id": "endless", "prompt": "word " * 3000}, {"id": "empty", "prompt": [[0, 99_999]]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def records(path: Path) -> dict[Any, Any]:
    return {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_a_file_is_answered_and_its_figures_add_up(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["run", "--in-process", "-i", "in.jsonl", "-m", str(model), "--temperature", "0"]
    files = ["-o", "out.jsonl", "--stats", "stats.json", "--trace", "trace.json"]
    assert main([*flags, *files]) == 1
    found = records(folder / "out.jsonl")
    assert len(found) == 9
    errors = {name: record["error"]["code"] for name, record in found.items() if "error" in record}
    assert errors == {"endless": "context_length_exceeded", "empty": "invalid_request"}
    assert [len(choice["text"]) > 0 for choice in found["text"]["choices"]] == [True] * 4
    assert found["text"]["usage"]["completion_tokens"] == 16
    logprobs = found["probable"]["logprobs"]
    assert "".join(logprobs["tokens"]) == found["probable"]["text"]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    # Greedy: the sampled token is the likeliest.
    for token, logprob, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == pytest.approx(logprob)
        assert logprob == max(top.values())

    stats = json.loads((folder / "stats.json").read_text())
    usages = [record["usage"] for record in found.values() if "usage" in record]
    assert stats["tokens"]["output"] == sum(usage["completion_tokens"] for usage in usages)
    assert stats["tokens"]["output"] == stats["engine"]["output_tokens"]
    assert stats["tokens"]["prompt"] == sum(usage["prompt_tokens"] for usage in usages)
    assert stats["requests"] == {
        "answered": 7, "failed": 2, "remaining": 0, "earlier_answers": 0, "earlier_errors": 0,
    }  # fmt: skip
    table = capsys.readouterr().err
    for word in (
        "7 answered, 2 failed",
        "prefill",
        "decode",
        "TTFT",
        "TPOT",
        "queue",
        "steps",
        "KV peak",
        "preemptions",
    ):
        assert word in table

    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    steps = [event for event in trace if event["ph"] == "X" and event["pid"] == 1]
    assert len(steps) == stats["engine"]["steps"]


def test_a_dry_run_counts_the_tokens_that_a_run_then_reads(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["run", "--in-process", "-i", "in.jsonl", "-m", str(model), "--limit", "7"]
    assert main([*flags, "--dry-run"]) == 0
    table = capsys.readouterr().err
    assert main([*flags, "-o", "out.jsonl", "--temperature", "0"]) == 0
    tokens = sum(record["usage"]["prompt_tokens"] for record in records(folder / "out.jsonl").values())
    assert f"{tokens:,} in prompts" in table


def test_a_resume_with_another_model_is_refused(
    folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    place = folder / "model"
    place.symlink_to(model)
    flags = ["run", "--in-process", "-i", "in.jsonl", "-o", "out.jsonl", "-m", "model", "-q"]
    assert main([*flags, "--limit", "2"]) == 0
    before = (folder / "out.jsonl").read_bytes()
    place.unlink()
    place.symlink_to(write_dir("llama", tmp_path_factory.mktemp("other"), seed=1))
    assert main([*flags, "--resume"]) == 2
    assert "the content of the model has changed" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_bytes() == before


def test_a_model_that_is_not_there_is_a_model_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--in-process", "-i", "in.jsonl", "-o", "out.jsonl", "-m", "./nothing"]) == 3
    assert "nothing" in capsys.readouterr().err
    assert (
        main(["run", "--in-process", "-i", "in.jsonl", "-o", "out.jsonl", "-m", "./nothing"]) == 3
    )  # and nothing is in the way
