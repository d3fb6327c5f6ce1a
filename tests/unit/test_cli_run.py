"""`mlxbatch run` as a process, on an engine without a model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FAKE_RUN = [sys.executable, str(Path(__file__).parents[1] / "e2e" / "fake_run.py"), "run"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXBATCH_")}
    return kept | {"MLXBATCH_CONFIG": str(tmp_path / "config.toml")}


@pytest.fixture
def run(tmp_path: Path, environ: dict[str, str]) -> Any:
    def call(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*FAKE_RUN, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ | more,
            timeout=60,
        )

    return call


def test_standard_input_to_standard_output(run: Any) -> None:
    done = run("-i", "-", "-o", "-", "--order", "input", stdin="one\ntwo\n")
    assert done.returncode == 0
    assert [json.loads(line)["custom_id"] for line in done.stdout.splitlines()] == ["line-1", "line-2"]
    assert "2 answered, 0 failed" in done.stderr


def test_exit_codes(run: Any, tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    codes = {
        ("-i", "good.jsonl"): 0,
        ("-i", "bad.jsonl"): 1,
        ("-i", "bad.jsonl", "--dry-run"): 1,
        ("-i", "nothing.jsonl"): 2,
        ("-i", "good.jsonl", "--limit", "0"): 2,
        ("-i", "good.jsonl", "--block-size", "5"): 2,
        ("-i", "good.jsonl", "-o", "no/such/folder"): 2,
        (): 2,
    }
    assert {flags: run(*flags).returncode for flags in codes} == codes


def test_flags_variables_and_the_config_file_reach_the_requests(run: Any, tmp_path: Path) -> None:
    def tokens(*flags: str, **variables: str) -> int:
        done = run("-i", "-", "-q", *flags, stdin="LONG\n", **variables)
        assert done.stderr == ""
        return int(json.loads(done.stdout)["usage"]["completion_tokens"])

    assert tokens() == 60
    (tmp_path / "config.toml").write_text("[run]\nmax_tokens = 7\n")
    assert tokens() == 7
    assert tokens(MLXBATCH_MAX_TOKENS="6") == 6
    assert tokens("--max-tokens", "5", MLXBATCH_MAX_TOKENS="6") == 5
    (tmp_path / "config.toml").write_text("[run]\nmax_token = 7\n")
    assert "did you mean 'max_tokens'" in run("-i", "-", stdin="x\n").stderr


def test_a_reader_that_leaves_is_no_traceback(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("LONG\n" * 500)
    with subprocess.Popen(
        [*FAKE_RUN, "-i", "in.txt"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environ,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        told = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in told
    assert "Exception" not in told


def test_an_interrupted_process_exits_with_130_and_whole_records(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("LONG\n" * 20_000)
    command = [*FAKE_RUN, "-i", "in.txt", "-o", "out", "--order", "completion"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environ) as process:
        while not (tmp_path / "out").exists() or not (tmp_path / "out").stat().st_size:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = process.stderr.read()
    assert process.returncode == 130
    assert "go on with --resume" in told
    records = (tmp_path / "out").read_text()
    assert records.endswith("\n")
    assert all(json.loads(line)["text"] for line in records.splitlines())
