"""Engine processes for real: started, joined, killed and stopped. The engine in them plays a script."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import MAIN, WireClient, ask, runtime_in, scripted_launcher
from scripted_process_engine import answer_text

from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError
from mlxbatch.process.async_client import AsyncEngineClient
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.control import EngineInUseError, stop_engine
from mlxbatch.process.launcher import LaunchOptions, engine_command
from mlxbatch.process.link import hello
from mlxbatch.process.messages import Stopping, Welcome
from mlxbatch.process.paths import RuntimeDir, is_alive
from mlxbatch.process.registry import Registry
from mlxbatch.process.status import LinkStatus
from mlxbatch.request import OutputDelta, Request, SamplingParams
from mlxbatch.tui.open_engine import Machine

GREEDY = SamplingParams(temperature=0, max_tokens=60)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[RuntimeDir]:
    runtime = runtime_in(tmp_path)
    yield runtime
    for record in Registry(runtime).live():
        stop_engine(record, runtime, force=True)


def request(request_id: str, prompt: str, params: SamplingParams = GREEDY) -> Request:
    return Request(request_id, tuple(prompt.encode()), params)


def expected(prompt: str, length: int = 60, index: int = 0) -> str:
    return answer_text(tuple(prompt.encode()), None, index, length).decode(errors="replace")


def drain(engine: ProcessEngine) -> dict[tuple[str, int], tuple[str, list[int], str | None]]:
    texts: dict[tuple[str, int], tuple[str, list[int], str | None]] = {}
    while engine.has_unfinished:
        for delta in engine.poll(5.0):
            text, tokens, _ = texts.get((delta.request_id, delta.index), ("", [], None))
            tokens = [*tokens, *delta.token_ids]
            texts[delta.request_id, delta.index] = text + delta.text, tokens, delta.finish_reason
    return texts


def test_the_first_client_starts_the_engine_and_later_ones_join(runtime: RuntimeDir, tmp_path: Path) -> None:
    count = tmp_path / "count"
    first = ProcessEngine(scripted_launcher(runtime, count=count))
    second = ProcessEngine(scripted_launcher(runtime, EngineConfig(max_num_seqs=3), count=count))
    assert first.started_engine and not second.started_engine
    assert first.engine_pid == second.engine_pid != os.getpid()
    first.close()
    second.submit(request("r", "hello"))
    assert drain(second)["r", 0][0] == expected("hello")
    second.close()
    third = ProcessEngine(scripted_launcher(runtime, count=count))  # it stays without clients
    assert third.engine_pid == first.engine_pid
    third.close()
    assert len(count.read_text().splitlines()) == 1


def test_many_starters_at_once_get_one_engine(runtime: RuntimeDir, tmp_path: Path) -> None:
    count = tmp_path / "count"
    barrier = threading.Barrier(6)
    pids: list[int] = []
    errors: list[Exception] = []

    def start() -> None:
        try:
            launcher = scripted_launcher(runtime, None, "--load-seconds", "0.3", count=count)
            barrier.wait()
            engine = ProcessEngine(launcher)
            pids.append(engine.engine_pid)
            engine.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(pids) == 6 and len(set(pids)) == 1
    assert len(count.read_text().splitlines()) == 1


def test_two_engine_processes_for_one_model_are_one(runtime: RuntimeDir) -> None:
    """Started by hand, past the launcher's lock: the second finds the first and ends."""
    launcher = scripted_launcher(runtime)
    engine = ProcessEngine(launcher)
    command = launcher._command(launcher.config, runtime, LaunchOptions())
    second = subprocess.run(list(command), capture_output=True, text=True, timeout=60)
    assert second.returncode == 0 and "another process already serves" in second.stderr
    engine.submit(request("r", "hello"))
    assert drain(engine)["r", 0][0] == expected("hello")
    engine.close()


def test_what_a_killed_engine_leaves_behind_is_no_obstacle(runtime: RuntimeDir) -> None:
    launcher = scripted_launcher(runtime)
    engine = ProcessEngine(launcher)
    os.kill(engine.engine_pid, signal.SIGKILL)
    engine.close()
    while is_alive(launcher.paths):
        pass
    assert launcher.paths.socket.exists() and launcher.paths.record.exists()
    assert Registry(runtime).live() == []
    again = ProcessEngine(scripted_launcher(runtime))
    again.submit(request("r", "hello"))
    assert drain(again)["r", 0][0] == expected("hello")
    again.close()


def test_a_socket_that_nobody_serves_is_replaced(runtime: RuntimeDir) -> None:
    launcher = scripted_launcher(runtime)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(launcher.paths.socket))
    engine = ProcessEngine(launcher)
    engine.close()


@pytest.mark.parametrize("deaths", [1, 3])
def test_every_stream_goes_on_after_the_engine_is_killed(runtime: RuntimeDir, deaths: int) -> None:
    states: list[LinkStatus] = []
    engine = ProcessEngine(scripted_launcher(runtime, None, "--pace", "0.01"), on_status=states.append)
    params = SamplingParams(temperature=0, max_tokens=60)
    two = SamplingParams(temperature=0, max_tokens=60, n=2)
    for number in range(6):
        engine.submit(request(f"r{number}", f"prompt {number}", params))
    engine.submit(request("two", "two", two))
    texts: dict[tuple[str, int], str] = {}
    tokens: dict[tuple[str, int], int] = {}
    kills = [12 + 14 * number for number in range(deaths)]
    while engine.has_unfinished:
        for delta in engine.poll(5.0):
            key = delta.request_id, delta.index
            texts[key] = texts.get(key, "") + delta.text
            tokens[key] = tokens.get(key, 0) + len(delta.token_ids)
            assert delta.finish_reason in (None, "length")
        if kills and tokens and min(tokens.values()) >= kills[0]:
            kills.pop(0)
            os.kill(engine.engine_pid, signal.SIGKILL)
    assert not kills
    assert texts == {(f"r{n}", 0): expected(f"prompt {n}") for n in range(6)} | {
        ("two", index): expected("two", index=index) for index in range(2)
    }
    assert set(tokens.values()) == {60}
    assert [status.state for status in states] == ["restarting", "ready"] * deaths
    assert "7 requests resume" in states[0].text
    engine.close()


def test_two_clients_share_the_restarted_engine(runtime: RuntimeDir, tmp_path: Path) -> None:
    count = tmp_path / "count"
    clients = [ProcessEngine(scripted_launcher(runtime, None, "--pace", "0.01", count=count)) for _ in range(2)]
    for number, client in enumerate(clients):
        client.submit(request("r", f"client {number}"))
    while not clients[0].poll(1.0):
        pass
    os.kill(clients[0].engine_pid, signal.SIGKILL)
    texts: list[dict] = [{}, {}]

    def finish(number: int) -> None:
        texts[number] = drain(clients[number])

    threads = [threading.Thread(target=finish, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[1]["r", 0][0] == expected("client 1")
    assert expected("client 0").endswith(texts[0]["r", 0][0])  # what came before the kill was read above
    assert clients[0].engine_pid == clients[1].engine_pid
    assert len(count.read_text().splitlines()) == 2
    for client in clients:
        client.close()


def test_an_engine_that_dies_at_once_every_time_is_given_up(runtime: RuntimeDir) -> None:
    states: list[LinkStatus] = []
    engine = ProcessEngine(scripted_launcher(runtime, None, "--crash-after", "0"), on_status=states.append)
    engine.submit(request("r", "poison"))
    with pytest.raises(EngineError, match="died 4 times in a row") as given_up:
        drain(engine)
    assert str(runtime.logs) in str(given_up.value)
    assert [status.state for status in states].count("restarting") == 3
    (last,) = engine.poll()
    assert last.finish_reason == "error"


def test_an_engine_that_crashes_now_and_then_still_finishes_everything(runtime: RuntimeDir) -> None:
    engine = ProcessEngine(scripted_launcher(runtime, None, "--crash-after", "150", "--pace", "0.01"))
    for number in range(8):
        engine.submit(request(f"r{number}", f"prompt {number}"))
    texts = drain(engine)
    assert {name: text for (name, _), (text, _, _) in texts.items()} == {
        f"r{n}": expected(f"prompt {n}") for n in range(8)
    }
    engine.close()


def test_an_interface_sees_the_restart_and_loses_nothing(runtime: RuntimeDir) -> None:
    async def main() -> None:
        client = AsyncEngineClient(scripted_launcher(runtime, None, "--pace", "0.01"))
        await client.start()
        for number in range(8):
            submit = ask(f"r{number}", f"tab {number}", max_tokens=60, priority=0)
            await client.submit(submit)
        texts: dict[str, str] = {}
        states: list[str] = []
        ended, killed = 0, False
        async for event in client.events():
            if isinstance(event, LinkStatus):
                states.append(event.state)
            if isinstance(event, OutputDelta):
                texts[event.request_id] = texts.get(event.request_id, "") + event.text
                ended += event.finish_reason is not None
                if not killed and len(texts) == 8 and min(map(len, texts.values())) > 8:
                    killed = True
                    os.kill(client.engine_pid, signal.SIGKILL)
                if ended == 8:
                    break
        assert texts == {f"r{n}": expected(f"tab {n}") for n in range(8)}
        assert [state for state in states if state != "starting"] == ["ready", "restarting", "ready"]
        assert client.restarts == 1
        await client.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_an_engine_that_cannot_load_tells_the_reason(runtime: RuntimeDir) -> None:
    with pytest.raises(EngineError, match=r"^there is no such model$"):
        ProcessEngine(scripted_launcher(runtime, None, "--fail", "there is no such model"))


def test_an_engine_that_dies_while_it_loads_shows_its_log(runtime: RuntimeDir) -> None:
    # Whether the client joins before the engine dies is a race; its log is shown either way.
    with pytest.raises(EngineError, match=r"died while it loaded|did not start \(exit code -6\)") as died:
        ProcessEngine(scripted_launcher(runtime, None, "--die-loading"))
    assert str(died.value).endswith("Fatal Python error: Aborted")


def test_an_engine_that_does_not_start_shows_its_log(runtime: RuntimeDir) -> None:
    with pytest.raises(EngineError, match=r"did not start \(exit code 2\)") as failed:
        ProcessEngine(scripted_launcher(runtime, None, "--no-such-flag"))
    assert "unrecognized arguments: --no-such-flag" in str(failed.value)


def test_what_earlier_engines_wrote_is_not_the_end_of_the_log(runtime: RuntimeDir) -> None:
    for flag in ("--die-loading", "--no-such-flag"):
        with pytest.raises(EngineError) as died:
            ProcessEngine(scripted_launcher(runtime, None, flag))
    shown = str(died.value)
    assert "unrecognized arguments" in shown and "Fatal Python error" not in shown


def test_it_outlives_the_client_and_ends_when_idle(runtime: RuntimeDir) -> None:
    launcher = scripted_launcher(runtime, None, "--idle-exit", "0.5")
    engine = ProcessEngine(launcher)
    engine.submit(request("r", "hello"))
    drain(engine)
    assert is_alive(launcher.paths)
    engine.close()
    while is_alive(launcher.paths):
        pass
    assert not launcher.paths.socket.exists() and not launcher.paths.record.exists()


def test_stop_refuses_while_in_use_and_force_does_not(runtime: RuntimeDir) -> None:
    launcher = scripted_launcher(runtime, None, "--pace", "0.05")
    engine = ProcessEngine(launcher)
    (record,) = Registry(runtime).live()
    with pytest.raises(EngineInUseError, match="in use"):
        stop_engine(record, runtime)
    engine.submit(request("r", "hello"))
    stop_engine(record, runtime, force=True)
    with pytest.raises(EngineError, match="stopped"):
        drain(engine)
    assert not is_alive(launcher.paths)
    with pytest.raises(EngineError, match="does not answer"):
        stop_engine(record, runtime)


def test_the_interface_stops_an_idle_engine_by_name(runtime: RuntimeDir) -> None:
    machine = Machine(runtime)
    launchers = [scripted_launcher(runtime, EngineConfig(model=name)) for name in ("smollm2-135m", "qwen3-4b")]
    launchers[0].connect(hello("control")).close()  # nobody that uses it
    user = ProcessEngine(launchers[1])
    assert machine.idle_models()["smollm2-135m"] == "1.00 MB"
    with pytest.raises(EngineInUseError, match="in use"):
        machine.stop("qwen3-4b")
    machine.stop("smollm2-135m")
    assert not is_alive(launchers[0].paths)
    assert machine.running_models() == ["qwen3-4b"]
    with pytest.raises(EngineError, match="no engine runs for smollm2-135m"):
        machine.stop("smollm2-135m")
    user.close()


def test_stop_reaches_an_engine_that_still_loads(runtime: RuntimeDir) -> None:
    launcher = scripted_launcher(runtime, None, "--load-seconds", "600")
    failed: list[Exception] = []
    loading = threading.Event()  # the client has joined: from here on it hears why the engine stops

    def connect() -> None:
        try:
            ProcessEngine(launcher, on_loading=lambda *_: loading.set())
        except EngineError as error:
            failed.append(error)

    connecting = threading.Thread(target=connect)
    connecting.start()
    assert loading.wait(60)
    stop_engine(Registry(runtime).live()[0], runtime, force=True)
    connecting.join(60)
    assert len(failed) == 1 and not is_alive(launcher.paths)


def test_sigterm_is_a_goodbye(runtime: RuntimeDir) -> None:
    launcher = scripted_launcher(runtime)
    engine = ProcessEngine(launcher)
    client = WireClient(launcher.paths.socket)
    client.send(hello("chat"))
    client.until(Welcome)
    os.kill(engine.engine_pid, signal.SIGTERM)
    stopping = client.until(Stopping)
    assert isinstance(stopping, Stopping) and stopping.reason == "asked"
    while is_alive(launcher.paths):
        pass
    assert not launcher.paths.socket.exists()


def test_a_folder_of_that_name_where_the_user_works_is_never_imported(tmp_path: Path) -> None:
    for name in ("mlxbatch", "tui", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    command = engine_command(EngineConfig(), runtime_in(tmp_path), LaunchOptions())
    assert command[:2] == [sys.executable, "-P"] and "-P" not in MAIN.name
    done = subprocess.run([*command[:4], "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--idle-exit" in done.stdout
