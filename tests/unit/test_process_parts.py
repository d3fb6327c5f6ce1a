"""Paths, locks, registry, idleness, wakefulness, restarts: the small parts of the engine process."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError, UsageError
from mlxbatch.process.awake import Awake
from mlxbatch.process.control import find_engine
from mlxbatch.process.idle import IdleTimer
from mlxbatch.process.messages import Welcome
from mlxbatch.process.paths import SOCKET_PATH_MAX, FileLock, RuntimeDir, absolute, engine_key, is_alive
from mlxbatch.process.registry import EngineRecord, Registry, reserved, who_holds_what
from mlxbatch.process.stats import stats_since
from mlxbatch.process.status import RestartBudget, joined_status


def test_the_directory_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    runtime = RuntimeDir(tmp_path / "run", tmp_path / "logs").prepared()
    assert stat.S_IMODE(runtime.path.stat().st_mode) == 0o700
    assert not runtime.logs.exists()  # not before an engine writes there


def test_a_link_to_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="not a directory of your own"):
        RuntimeDir(tmp_path / "run", tmp_path / "logs").prepared()


def test_long_paths_get_a_short_stand_in_of_their_own(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 60) / ("y" * 60)
    first = RuntimeDir(long / "a", tmp_path / "logs").prepared()
    second = RuntimeDir(long / "b", tmp_path / "logs").prepared()
    try:
        assert first.path != second.path
        for runtime in (first, second):
            assert len(os.fsencode(runtime.engine("0123456789ab").socket)) <= SOCKET_PATH_MAX
            assert stat.S_IMODE(runtime.path.stat().st_mode) == 0o700
        assert RuntimeDir(long / "a", tmp_path / "logs").prepared().path == first.path
    finally:
        first.path.rmdir()
        second.path.rmdir()


def test_an_engine_is_named_by_what_it_loads_not_by_its_limits() -> None:
    base = EngineConfig(model="m")
    same = EngineConfig(model="m", max_num_seqs=4, kv_memory=10**9, policy="shortest", seed=5)
    assert engine_key(base) == engine_key(same)
    others = [
        EngineConfig(model="n"),
        EngineConfig(model="m", dtype="float16"),
        EngineConfig(model="m", adapter="a"),
        EngineConfig(model="m", revision="r"),
        EngineConfig(model="m", import_bits=4),
    ]
    assert len({engine_key(config) for config in [base, *others]}) == 6


def test_model_paths_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute(EngineConfig(model="model")).model == str(tmp_path / "model")
    assert absolute(EngineConfig(model="smollm2-135m")).model == "smollm2-135m"  # the catalog goes first
    assert absolute(EngineConfig(model="org/name")).model == "org/name"
    assert engine_key(EngineConfig(model="./model")) == engine_key(EngineConfig(model=str(tmp_path / "model")))


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    runtime = RuntimeDir(tmp_path / "run", tmp_path / "logs").prepared()
    paths = runtime.engine("k")
    assert not is_alive(paths)
    code = (
        "import sys, pathlib; from mlxbatch.process.paths import FileLock; "
        "lock = FileLock(pathlib.Path(sys.argv[1])); print(lock.try_acquire(), flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(paths.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    assert is_alive(paths)
    assert not FileLock(paths.lock).try_acquire()
    holder.kill()
    holder.communicate()
    assert not is_alive(paths)
    lock = FileLock(paths.lock)
    assert lock.acquire(5) and is_alive(paths)
    lock.release()
    assert not is_alive(paths)


def record(key: str, **fields: object) -> EngineRecord:
    values: dict[str, object] = {"key": key, "pid": 1, "model": f"model-{key}", "version": "0", "started": 0.0}
    return EngineRecord(**(values | fields))  # type: ignore[arg-type]


def test_the_registry_counts_the_living_only(tmp_path: Path) -> None:
    runtime = RuntimeDir(tmp_path / "run", tmp_path / "logs").prepared()
    first, second = Registry(runtime), Registry(runtime)
    for registry, key in ((first, "a"), (second, "b")):
        registry.publish(record(key, started=float(ord(key))))
    lock_a, lock_b = FileLock(runtime.engine("a").lock), FileLock(runtime.engine("b").lock)
    assert lock_a.try_acquire() and lock_b.try_acquire()
    first.reserve(96 * 10**9, 2 * 10**9)
    first.publish(record("a", clients=2, requests=1))  # what is published later keeps the bytes
    assert [r.key for r in second.live()] == ["a", "b"]
    assert reserved(second.others("b")) == 96 * 10**9
    assert second.others("b")[0].clients == 2
    lock_a.release()  # killed: its record is left behind
    assert second.others("b") == []
    (runtime.engine("b").record).write_text("{torn")
    assert first.live() == []
    lock_b.release()


def test_engines_load_one_after_another(tmp_path: Path) -> None:
    runtime = RuntimeDir(tmp_path / "run", tmp_path / "logs").prepared()
    order: list[str] = []
    waits = threading.Event()

    def load_second() -> None:
        with Registry(runtime).budgeting(waits.set):
            order.append("second")

    second = threading.Thread(target=load_second)
    with Registry(runtime).budgeting(lambda: order.append("waited for nobody")):
        second.start()
        assert waits.wait(30)
        order.append("first")
    second.join(30)
    assert order == ["first", "second"]


def test_who_holds_what_offers_the_idle_ones() -> None:
    busy = record("a", reserved_bytes=96 * 10**9, clients=1, requests=3, pid=11)
    idle = record("b", reserved_bytes=8 * 10**9, idle_since=400.0, pid=12)
    text = who_holds_what([idle, busy], now=1000.0)
    assert "model-a holds 96.0 GB (1 client, 3 requests, process 11)" in text
    assert "model-b holds 8.00 GB (idle for 10 min 00 s, process 12)" in text
    assert text.endswith("mlxbatch engine stop model-b")
    assert "--force" in who_holds_what([busy], now=1000.0)
    assert who_holds_what([]) == ""


def test_engines_are_found_by_name_path_or_key() -> None:
    records = [record("k1", model="/models/qwen"), record("k2", model="smollm2-135m")]
    assert find_engine(records, "smollm2-135m").key == "k2"
    assert find_engine(records, "/models/qwen").key == find_engine(records, "qwen").key == "k1"
    assert find_engine(records, "k2").key == "k2"
    assert find_engine(records[:1], None).key == "k1"
    with pytest.raises(UsageError, match="name one of"):
        find_engine(records, None)
    with pytest.raises(EngineError, match="running: /models/qwen, smollm2-135m"):
        find_engine(records, "llama")
    with pytest.raises(UsageError, match="k1, k3"):
        find_engine([records[0], record("k3", model="/models/qwen")], "qwen")
    with pytest.raises(EngineError, match="no engine is running"):
        find_engine([], None)


def test_idle_timer() -> None:
    timer = IdleTimer(60.0, now=0.0)
    assert not timer.expired(59.0) and timer.expired(60.0)
    timer.update(True, 59.0)
    assert not timer.expired(1000.0) and timer.idle_seconds(1000.0) == 0.0
    timer.update(False, 100.0)
    timer.update(False, 130.0)
    assert timer.idle_seconds(130.0) == 30.0
    assert not timer.expired(159.0) and timer.expired(160.0)
    assert not IdleTimer(None, now=0.0).expired(1e9)


class Spawned:
    def __init__(self) -> None:
        self.ended = False

    def terminate(self) -> None:
        self.ended = True

    def wait(self) -> int:
        return 0


@pytest.mark.parametrize(("platform", "allow_sleep"), [("linux", False), ("darwin", True)])
def test_nothing_is_kept_awake_elsewhere_or_when_sleep_is_allowed(platform: str, allow_sleep: bool) -> None:
    def spawn(command: object) -> Spawned:
        raise AssertionError("nothing may be started")

    awake = Awake(platform=platform, allow_sleep=allow_sleep, spawn=spawn)
    awake.set_busy(True)
    assert not awake.held


def test_awake_holds_one_process_and_lives_without_caffeinate() -> None:
    spawned: list[Spawned] = []

    def spawn(command: object) -> Spawned:
        spawned.append(Spawned())
        return spawned[-1]

    awake = Awake(platform="darwin", spawn=spawn)
    for busy in (True, True, False, False, True):
        awake.set_busy(busy)
    assert len(spawned) == 2 and spawned[0].ended and not spawned[1].ended and awake.held

    def missing(command: object) -> Spawned:
        raise FileNotFoundError("caffeinate")

    without = Awake(platform="darwin", spawn=missing)
    without.set_busy(True)
    assert not without.held


def test_restarts_without_a_token_are_bounded() -> None:
    budget = RestartBudget(limit=3)
    for _ in range(10):
        assert budget.allows_another()
        budget.progressed()
    assert [budget.allows_another() for _ in range(4)] == [True, True, True, False]


def test_stats_since_counts_from_the_beginning_of_a_client() -> None:
    then = {"steps": 10, "row_steps": 10, "output_tokens": 10, "mean_rows_per_step": 1.0, "kv_peak_blocks": 5}
    now = then | {"steps": 15, "row_steps": 30, "output_tokens": 30, "kv_peak_blocks": 9, "rows": 3}
    since = stats_since(now, then)
    assert since["steps"] == 5 and since["output_tokens"] == 20
    assert since["mean_rows_per_step"] == 4.0
    assert since["kv_peak_blocks"] == 9 and since["rows"] == 3
    assert since["kv_peak_is_older"] is False
    assert stats_since(now | {"kv_peak_blocks": 5}, then)["kv_peak_is_older"] is True
    assert stats_since(now, {}) == now


def test_a_client_that_joins_learns_which_of_its_settings_do_not_count() -> None:
    running = EngineConfig(model="m", max_num_seqs=8, block_size=32)
    welcome = Welcome(
        protocol=1, version="", client_id="c1", engine_pid=7, started=0, model="m", settings=running.as_dict()
    )
    assert "max_num_seqs 8 (not 16)" in joined_status(welcome, EngineConfig(model="m", max_num_seqs=16)).text
    assert "keeps" not in joined_status(welcome, EngineConfig(model="m")).text
    assert "keeps" not in joined_status(welcome, EngineConfig(model="m", max_num_seqs=8)).text
