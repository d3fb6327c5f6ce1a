"""What snapshots tell about clients and their requests: how far a run is, and what ended requests were called."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_harness import ServerThread, ask, refuse_to_start, runtime_in, serving

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError
from mlxbatch.process import client as client_module
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.messages import Progress, SnapshotFrame, SnapshotRequest
from mlxbatch.process.served import NAMES_KEPT


def progress_of(engine: ProcessEngine) -> list[tuple[str, int, int]]:
    return [(info.title, info.done, info.total) for info in engine.snapshot().clients if info.kind == "run"]


def test_a_run_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_in(tmp_path)
    launcher = Launcher(EngineConfig(), runtime=runtime, command=refuse_to_start)
    server = ServerThread(runtime, key=launcher.paths.key)
    try:
        run = ProcessEngine(launcher, kind="run", title="run:evals")
        assert progress_of(run) == [("run:evals", 0, 0)]
        monkeypatch.setattr(client_module, "PROGRESS_SECONDS", 3600.0)
        run.report_progress(1, 100)
        run.report_progress(41, 100)  # too soon after the first
        assert progress_of(run) == [("run:evals", 1, 100)]
        run.report_progress(100, 100)  # the end is always told
        assert progress_of(run) == [("run:evals", 100, 100)]
        other = ProcessEngine(launcher, kind="chat")
        assert progress_of(other) == [("run:evals", 100, 100)]
        with pytest.raises(EngineError, match="keeps no trace"):
            run.write_trace(tmp_path / "trace.json")
        other.close()
        run.close()
    finally:
        server.stop()


def test_progress_is_told_again_on_a_new_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PROGRESS_SECONDS", 3600.0)
    runtime = runtime_in(tmp_path)
    launcher = Launcher(EngineConfig(), runtime=runtime, command=refuse_to_start)
    server = ServerThread(runtime, key=launcher.paths.key)
    try:
        run = ProcessEngine(launcher, kind="run", title="run:evals")
        run.report_progress(1, 100)
        server.on_loop(lambda: [connection.abort() for connection in server.server._clients.values()])
        assert progress_of(run) == [("run:evals", 0, 0)]
        run.report_progress(2, 100)
        assert progress_of(run) == [("run:evals", 2, 100)]
        run.close()
    finally:
        server.stop()


def test_events_name_requests_that_have_ended(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.wire("run")
        client.send(ask("one", label="the first", max_tokens=2))
        client.answers(1)
        client.send(ask("two", max_tokens=2))
        client.answers(1)
        client.send(Progress(done=2, total=3))
        client.send(SnapshotRequest(call=1))
        frame = client.until(SnapshotFrame)
        assert isinstance(frame, SnapshotFrame)
        assert [(e.kind, e.label) for e in frame.snapshot.events] == [("finish", "the first"), ("finish", "two")]
        assert server.server._service is not None
        assert server.server._table.name_of("c1/one") == ("the first", "a test")


def test_names_of_ended_requests_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        client = server.wire("run")
        for first in range(0, NAMES_KEPT + 40, 40):
            for number in range(first, first + 40):
                client.send(ask(f"r{number}", label=f"label {number}", max_tokens=1))
            client.answers(40)
        server.on_loop(lambda: None)
        table = server.server._table
        assert len(table._ended) == NAMES_KEPT
        assert table.name_of("c1/r0") == ("r0", "")  # long ago
        assert table.name_of(f"c1/r{NAMES_KEPT + 39}") == (f"label {NAMES_KEPT + 39}", "a test")
