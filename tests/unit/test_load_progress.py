"""A first run shows how far its download is, wherever its engine runs."""

from __future__ import annotations

import argparse
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from mlxbatch.batch.progress import BarReporter, PlainReporter, SilentReporter
from mlxbatch.cli import run as run_command
from mlxbatch.config import EngineConfig
from mlxbatch.errors import ModelError
from mlxbatch.models.progress import Progress, once
from mlxbatch.process.messages import Loading

SIZE = 98_000_000
CONFIG = EngineConfig(model="some/model")


@pytest.fixture
def slow_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxbatch.engine import assembly

    def load(model: str, *, progress: Progress, **_: Any) -> None:
        for part in range(50):
            progress(f"downloading {model}", part * SIZE // 49, SIZE)
        raise ModelError("that is all")

    monkeypatch.setattr(assembly, "load", load)


def load_locally(progress: Progress) -> None:
    with pytest.raises(ModelError, match="that is all"):
        run_command.open_local_engine(CONFIG, progress=progress, trace=False)


def test_an_engine_in_this_process_reports_bytes(slow_load: None) -> None:
    seen: list[tuple[str, int, int]] = []
    load_locally(lambda *work: seen.append(work))
    assert seen[0] == ("loading some/model", 0, 0)
    assert seen[-1] == ("downloading some/model", SIZE, SIZE) and len(seen) == 51


def test_a_log_gets_a_line_for_each_piece_of_work_and_a_terminal_a_bar(slow_load: None) -> None:
    out = StringIO()
    load_locally(PlainReporter(Console(file=out, width=80)).phase)
    assert out.getvalue().splitlines() == ["loading some/model", "downloading some/model"]
    out = StringIO()
    reporter = BarReporter(Console(file=out, width=100, force_terminal=True))
    load_locally(reporter.phase)
    reporter.close()
    assert "98.0 MB of 98.0 MB" in out.getvalue()
    told: list[str] = []
    load_locally(once(told.append))
    assert told == ["loading some/model", "downloading some/model"]


def test_an_engine_in_its_own_process_reports_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxbatch.process import client
    from mlxbatch.process.launcher import LaunchOptions

    def connect(config: EngineConfig, *, on_loading: Any, **_: Any) -> None:
        on_loading(Loading(stage="downloading some/model", done=SIZE // 2, total=SIZE))

    monkeypatch.setattr(client, "connect", connect)
    parser = argparse.ArgumentParser()
    run_command.add_parser(parser.add_subparsers())
    opener = run_command.engine_opener(parser.parse_args(["run", "-i", "in.txt"]), SilentReporter(), LaunchOptions())
    seen: list[tuple[str, int, int]] = []
    opener(CONFIG, progress=lambda *work: seen.append(work), trace=False)
    assert seen == [("downloading some/model", SIZE // 2, SIZE)]


def test_what_is_loading_in_words() -> None:
    assert Loading(stage="reading weights", done=1, total=4).text == "reading weights 25 %"
    assert Loading(stage="reading weights").text == "reading weights"
