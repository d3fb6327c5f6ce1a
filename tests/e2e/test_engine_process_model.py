"""The engine process with a real model in it: killed, fuzzed, shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.fuzz_engine import fuzz
from e2e.kill_engine import kill_rounds, tiny_model
from e2e.shared_engine import Setup, shared
from process_harness import runtime_in, scripted_launcher

from mlxbatch.config import EngineConfig
from mlxbatch.process.control import stop_engine
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.registry import Registry


@pytest.mark.parametrize("client", ["sync", "async"])
def test_greedy_text_is_the_undisturbed_one_after_kill_9(tmp_path: Path, client: str) -> None:
    kill_rounds(tiny_model(tmp_path), tmp_path, kills=1, kind=client, seed=5)


@pytest.mark.slow
def test_kill_9_twenty_times(tmp_path: Path) -> None:
    kill_rounds("smollm2-135m", tmp_path, kills=20)


def test_bytes_on_the_socket_never_harm_the_engine(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    try:
        fuzz(scripted_launcher(runtime), attacks=300, seed=3)
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)


@pytest.mark.slow
def test_bytes_on_the_socket_never_harm_the_real_engine(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    try:
        fuzz(Launcher(EngineConfig(model=tiny_model(tmp_path)), runtime=runtime), attacks=2000, seed=4)
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)


def test_two_chats_and_a_run_share_one_engine(tmp_path: Path) -> None:
    shared(Setup(tmp_path, tiny_model(tmp_path), run_requests=400, run_tokens=64, chat_tokens=32))
