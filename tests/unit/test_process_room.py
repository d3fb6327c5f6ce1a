"""Engines of different models on one machine: who gives way to whom, and takes back what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from process_harness import ServerThread, ask, runtime_in
from scripted_process_engine import Script, ScriptedEngine

from mlxbatch.capacity.budget import MemoryBudget
from mlxbatch.engine.memory_plan import MemoryClaim, kv_budget, pool_range
from mlxbatch.errors import ModelError
from mlxbatch.process import room
from mlxbatch.process.messages import Accepted, CallFailed, Deltas, GiveWay, Pong
from mlxbatch.process.paths import FileLock, RuntimeDir
from mlxbatch.process.registry import Registry, reserved
from mlxbatch.process.room import make_room
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.plan import GroupSpec

MACHINE = 1000


@contextmanager
def engine_of(
    runtime: RuntimeDir, key: str, claim: tuple[int, int, int], script: Script | None = None
) -> Iterator[ServerThread]:
    """A served engine that holds (reserved, least, full) bytes of a machine of 1,000, alive to others."""
    lock = FileLock(runtime.engine(key).lock)
    assert lock.try_acquire()
    engine = ScriptedEngine(script)
    engine.claim = MemoryClaim(*claim, MACHINE)
    thread = ServerThread(runtime, engine=engine, key=key)
    try:
        thread.wire("top").close()  # it is ready
        thread.on_loop(thread.server.tick)
        yield thread
    finally:
        thread.stop()
        lock.release()


def _wait(event: threading.Event, seconds: float) -> None:
    event.wait(seconds)


def held(runtime: RuntimeDir) -> dict[str, int]:
    return {record.key: record.reserved_bytes for record in Registry(runtime).live()}


def test_idle_engines_give_way_as_far_as_is_needed_the_longest_idle_first(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    with engine_of(runtime, "old", (400, 100, 400)), engine_of(runtime, "new", (300, 100, 300)):
        others = make_room(Registry(runtime), "third", MemoryClaim(500, 200, 500, MACHINE))
        assert held(runtime) == {"old": 200, "new": 300}
        assert reserved(others) + 500 == MACHINE
        others = make_room(Registry(runtime), "third", MemoryClaim(10**6, 200, 10**6, MACHINE))
        assert held(runtime) == {"old": 100, "new": 100}  # never below what one conversation takes
        assert reserved(others) == 200


def test_an_engine_with_requests_and_one_with_a_fixed_pool_keep_what_they_hold(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    gate = threading.Event()
    with (
        engine_of(runtime, "fixed", (400, 400, 400)),
        engine_of(runtime, "busy", (400, 100, 400), Script(on_step=lambda: _wait(gate, 30))) as busy,
    ):
        client, control = busy.wire(), busy.wire("control")
        client.send(ask("one", max_tokens=3))
        client.until(Accepted)
        busy.on_loop(busy.server.tick)
        control.send(GiveWay(call=7, bytes=100))
        refused = control.until(CallFailed)
        assert isinstance(refused, CallFailed) and refused.code == "busy"
        make_room(Registry(runtime), "third", MemoryClaim(900, 900, 900, MACHINE))
        assert held(runtime) == {"fixed": 400, "busy": 400}
        gate.set()
        client.answers(1)
        control.send(GiveWay(call=8, bytes=100))
        assert control.until(Pong) == Pong(call=8)
        assert held(runtime) == {"fixed": 400, "busy": 300}
        control.send(GiveWay(call=9, bytes=-100))  # nobody grows by being asked
        control.until(Pong)
        assert held(runtime) == {"fixed": 400, "busy": 300}


def test_cached_blocks_go_only_where_the_newcomer_could_not_run(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    asked: list[bool] = []
    with engine_of(runtime, "old", (900, 100, 900)) as old:
        resize = old.engine.resize

        def keeping(reserved: int, *, evict: bool = False) -> None:
            asked.append(evict)
            resize(max(reserved, 100 if evict else 800))  # 700 of its bytes are cached blocks

        old.engine.resize = keeping  # type: ignore[method-assign]
        make_room(Registry(runtime), "new", MemoryClaim(500, 200, 500, MACHINE))
        assert (asked, held(runtime)) == ([False], {"old": 800})
        make_room(Registry(runtime), "new", MemoryClaim(500, 300, 500, MACHINE))
        assert (asked, held(runtime)) == ([False, False, True], {"old": 700})


def test_an_engine_in_use_again_takes_back_what_is_free_before_it_checks_a_request(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    with engine_of(runtime, "a", (900, 100, 900)) as a:
        checked: list[int] = []
        a.engine.script.on_submit = lambda request: checked.append(a.engine.claim.reserved)
        with engine_of(runtime, "b", (600, 600, 600)):
            make_room(Registry(runtime), "b", MemoryClaim(600, 600, 600, MACHINE))
            assert held(runtime) == {"a": 400, "b": 600}
            client = a.wire()
            client.send(ask("while b holds the rest", max_tokens=2))
            client.answers(1)
            assert held(runtime)["a"] == 400 and checked == [400]
        a.on_loop(lambda: setattr(a.server._share, "_next_try", 0.0))
        client.send(ask("after b has gone", max_tokens=2))
        client.answers(1)
        assert checked == [400, 900]
        assert held(runtime) == {"a": 900}


def test_taking_back_makes_idle_engines_give_way_in_turn(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    with engine_of(runtime, "a", (200, 200, 800)) as a, engine_of(runtime, "b", (800, 200, 800)):
        client = a.wire()
        client.send(ask("one", max_tokens=2))
        client.answers(1)
        assert held(runtime) == {"a": 800, "b": 200}


def test_nobody_takes_memory_back_while_another_engine_loads(tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    with engine_of(runtime, "a", (200, 200, 800)) as a, Registry(runtime).budgeting():
        client = a.wire()
        client.send(ask("one", max_tokens=2))
        assert isinstance(client.until(Deltas), Deltas)
        assert held(runtime) == {"a": 200}


def test_a_long_request_goes_on_to_take_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RETRY_SECONDS", 0.0)
    runtime = runtime_in(tmp_path)
    grown = threading.Event()
    with engine_of(runtime, "a", (200, 200, 800), Script(on_step=lambda: _wait(grown, 0.01))) as a:
        resize = a.engine.resize

        def watched(reserved: int, *, evict: bool = False) -> None:
            resize(reserved, evict=evict)
            grown.set()

        a.engine.resize = watched  # type: ignore[method-assign]
        with engine_of(runtime, "b", (800, 800, 800)):
            client = a.wire()
            client.send(ask("one", max_tokens=2000))
            client.until(Deltas)
            assert held(runtime)["a"] == 200
        assert grown.wait(30)
        assert held(runtime) == {"a": 800}


# -- what an engine claims -------------------------------------------------------------------------------------


def budget(**changes: int) -> MemoryBudget:
    values = {"working_set": 10**7, "weights": 10**6, "activations": 0, "tails": 0, "pending": 0, "layers": 4}
    return MemoryBudget(utilization=1.0, **(values | changes))  # type: ignore[arg-type]


def sizes(*windows: int | None) -> KVMemory:
    return KVMemory([GroupSpec(f"g{n}", (n,), w, 100) for n, w in enumerate(windows)], 16, 0)


def test_a_pool_is_no_larger_than_the_rows_could_fill() -> None:
    pools = pool_range(budget(), sizes(None), None, rows=4, max_model_len=1600)
    assert pools.full == (4 * 100 + 4 + 4 + 1) * 100
    assert pools.least == (100 + 1) * 100
    assert kv_budget(budget(), 200, pools.full, requested=False, memory=10**9) == pools.full
    assert kv_budget(budget(others=8_980_000), 200, pools.full, requested=False, memory=10**9) == 20_000 * 4 // 5
    claim = pools.claim(budget(), pools.full)
    assert (claim.reserved, claim.machine) == (1_000_000 + 40_900 + 10_225, 10_000_000)
    assert pools.within(budget(), claim.reserved) == pools.full
    assert pools.within(budget(), 0) == pools.least


def test_a_long_context_is_held_to_the_machine_and_gives_way_to_one_conversation() -> None:
    pools = pool_range(budget(), sizes(None), None, rows=16, max_model_len=1_000_000)
    assert pools.full == 9_000_000 * 4 // 5
    assert pools.least == (8192 // 16 + 1) * 100


def test_a_pool_that_the_user_named_never_moves() -> None:
    pools = pool_range(budget(), sizes(None), 123_456, rows=4, max_model_len=1600)
    assert pools.least == pools.full == 123_456
    assert kv_budget(budget(), 200, 123_456, requested=True, memory=10**9) == 123_456
    with pytest.raises(ModelError, match="does not fit beside other engines"):
        kv_budget(budget(others=8_900_000), 200, 123_456, requested=True, memory=10**9)


def test_a_pool_beyond_the_machines_memory_is_refused_with_the_arithmetic() -> None:
    whole = budget().with_pool(123_456)
    assert kv_budget(budget(), 200, 123_456, requested=True, memory=whole) == 123_456
    with pytest.raises(ModelError, match=r"does not fit this machine: .*, and there are"):
        kv_budget(budget(), 200, 123_456, requested=True, memory=whole - 1)
