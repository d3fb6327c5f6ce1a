"""`mlxbatch engine` on engine processes that play a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import scripted_launcher

from mlxbatch.cli.main import main
from mlxbatch.config import EngineConfig
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.control import stop_engine
from mlxbatch.process.launcher import LOG_OF_ONE, last_words
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.registry import Registry


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeDir]:
    monkeypatch.setenv("MLXBATCH_CONFIG", str(tmp_path / "none.toml"))
    runtime = RuntimeDir(tmp_path / "run", tmp_path / "logs").prepared()
    monkeypatch.setattr(RuntimeDir, "of_user", classmethod(lambda cls: runtime))
    yield runtime
    for record in Registry(runtime).live():
        stop_engine(record, runtime, force=True)


def test_without_an_engine(runtime: RuntimeDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "status"]) == 0
    assert main(["engine", "status", "--json"]) == 0
    assert capsys.readouterr().out == "no engine is running\n[]\n"
    assert main(["engine", "stop"]) == 3
    assert main(["engine", "stop", "--all"]) == 0
    assert main(["engine", "logs"]) == 2
    assert main(["engine", "logs", "smollm2-135m"]) == 2
    assert main(["engine", "start", "--idle-exit", "soon"]) == 2
    err = capsys.readouterr().err
    assert "no engine is running" in err and "no engine has ever run" in err and "--idle-exit" in err


def test_where_no_log_can_be_written_only_starting_an_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("no folder can be made in a file")
    (tmp_path / "run").mkdir()
    logs = tmp_path / "state" / "log"
    monkeypatch.setenv("MLXBATCH_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("platformdirs.user_log_dir", lambda *args, **options: str(logs))
    assert main(["engine", "status"]) == 0
    assert main(["engine", "stop", "--all"]) == 0
    assert main(["engine", "logs"]) == 2
    assert capsys.readouterr().out == "no engine is running\n"
    assert main(["engine", "start"]) == 3
    said = capsys.readouterr().err
    assert f"cannot write the engine's log, {logs}/engine-" in said
    assert "XDG_STATE_HOME" in said and "--in-process" in said


def test_status_stop_and_logs_of_two_engines(runtime: RuntimeDir, capsys: pytest.CaptureFixture[str]) -> None:
    engines = [ProcessEngine(scripted_launcher(runtime, EngineConfig(model=f"org/model-{n}"))) for n in range(2)]
    assert main(["engine", "status", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [(r["model"], r["pid"], r["ready"]) for r in records] == [
        (f"org/model-{n}", engine.engine_pid, True) for n, engine in enumerate(engines)
    ]
    assert records[0]["reserved_bytes"] == 1_000_000
    assert main(["engine", "status"]) == 0
    shown = capsys.readouterr().out
    assert "org/model-0" in shown and "1.00 MB" in shown and str(engines[1].engine_pid) in shown
    assert main(["engine", "stop"]) == 2  # which of them?
    assert main(["engine", "stop", "org/model-0"]) == 3
    assert "in use (1 clients, 0 requests); --force" in capsys.readouterr().err
    assert main(["engine", "start", "-m", "org/model-0"]) == 0
    assert f"already runs: scripted, process {engines[0].engine_pid}" in capsys.readouterr().out
    assert main(["engine", "stop", "model-0", "--force"]) == 0
    engines[1].close()
    assert main(["engine", "logs", "-n", "1"]) == 0  # of the one that is left
    assert "ready: scripted" in capsys.readouterr().out
    assert main(["engine", "logs", "org/model-0", "-n", "1"]) == 0  # after its end
    assert "stopping (asked): a user stopped the engine" in capsys.readouterr().out
    assert main(["engine", "stop", "--all", "org/model-1"]) == 2
    assert main(["engine", "stop", "--all"]) == 0
    assert Registry(runtime).live() == []
    assert main(["engine", "logs", "-n", "1"]) == 0  # the newest
    assert "stopping (asked)" in capsys.readouterr().out


def test_last_words_are_the_fatal_error_or_the_last_lines() -> None:
    lines = [f"line {n}" for n in range(10)]
    assert last_words(lines) == lines[-5:]
    fatal = [*lines, "[METAL] command buffer failed", "Fatal Python error: Aborted", "", *["  File ..."] * 40]
    assert last_words(fatal)[-2:] == ["[METAL] command buffer failed", "Fatal Python error: Aborted"]
    assert last_words([]) == []
    started = f"{LOG_OF_ONE}2026-01-01 00:00:00"
    assert last_words([*fatal, started, "one line"]) == ["one line"]
    assert last_words([*lines, f"cut of{started}", *lines]) == lines[-5:]
    assert last_words([*lines, started]) == []
