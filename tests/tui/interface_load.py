"""What the interface costs: processor time of the process, on a scripted engine or beside the real one.

    .venv/bin/python tests/tui/interface_load.py scripted      # share of a core, by tabs, rates and screen
    .venv/bin/python tests/tui/interface_load.py engine        # p99 of a decode step beside it

`scripted` runs the chat in a pseudo-terminal against an engine that only sends text, and reads the process's own
processor time, which other load on the machine does not change much. `engine` runs the same eight streams of
SmolLM2 twice in turn, read by the chat screen in a pseudo-terminal and by a client without a screen, with MLX
held to one core in both, and compares the engine's steps.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import resource
import select
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

ROWS, COLUMNS = 36, 120
TABS = 8
WORDS = "Each sequence owns a table of blocks, `table[pos // 16]`, and **nothing** is padded.\n\n- so\n- it\n- is\n\n"


def tokens() -> list[str]:
    return [word + " " for word in (WORDS * 60).split(" ")]


class InTerminal:
    """A program in a pseudo-terminal of its own; the end of what it writes is kept."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._parent = parent
        self._output = b""
        self._process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
        os.close(child)
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Raises RuntimeError with the end of the output when it fails or takes longer."""
        try:
            code: int | None = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = None
        self._thread.join(2.0)
        if code != 0:
            raise RuntimeError(f"exit code {code}: {self._output.decode(errors='replace')}")

    def _drain(self) -> None:
        while self._process.poll() is None:
            if select.select([self._parent], [], [], 0.2)[0]:
                try:
                    self._output = (self._output + os.read(self._parent, 65536))[-4000:]
                except OSError:
                    return


# The child processes: a chat application that measures itself.


def run_scripted_chat(folder: Path, rate: float, tabs: int, seconds: float, screen: str) -> None:
    """`rate` tokens a second over all tabs, each delta a token as a worst case, four snapshots a second."""
    from scripted_engine import ScriptedEngine

    from mlxbatch.history.store import HistoryStore
    from mlxbatch.tui.app import ChatApp
    from mlxbatch.tui.chat.workspace import Workspace
    from mlxbatch.tui.engine_link import LinkEvent

    class Talker(ScriptedEngine):
        """Steps in real time: one step gives each of the `tabs` rows a token."""

        async def events(self) -> AsyncIterator[LinkEvent]:
            due, next_snapshot = time.monotonic(), 0.0
            while True:
                now = time.monotonic()
                before = time.process_time()
                if not (self.running or self.queue):
                    due = now
                while due < now:  # also what a busy machine has left undone
                    self.step()
                    due += tabs / rate
                if now >= next_snapshot:
                    self.show()
                    next_snapshot = now + 0.25
                self.spent += time.process_time() - before
                while not self._outbox.empty():
                    event = self._outbox.get_nowait()
                    if event is None:
                        return
                    yield event
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    engine = Talker(script={"q": tokens()}, slots=tabs)
    engine.spent = 0.0  # processor time of the script itself, to be taken off
    workspace = Workspace(HistoryStore(folder / "history.sqlite3"), lambda model: engine, engine.model)
    workspace.restore()
    app = ChatApp(workspace)
    figures: dict[str, float] = {}

    async def drive() -> None:
        for number in range(tabs):
            app.chat_screen.composer.insert("q")
            app.chat_screen.send("q")
            if number < tabs - 1:
                await app.chat_screen.action_new_tab()
        if screen == "engine":
            app.action_engine()
        await asyncio.sleep(2.0)
        cpu, scripted, wall = time.process_time(), engine.spent, time.monotonic()
        count = engine.totals["output_tokens"]
        await asyncio.sleep(seconds)
        spent, lasted = time.process_time() - cpu - (engine.spent - scripted), time.monotonic() - wall
        figures["share of a core"] = spent / lasted
        figures["tokens a second"] = (engine.totals["output_tokens"] - count) / lasted
        app.exit()

    app.call_later(lambda: app.run_worker(drive()))
    app.run()
    if not figures:
        raise SystemExit(app.return_code or 1)
    (folder / "figures.json").write_text(json.dumps(figures))


def run_engine_chat(folder: Path, model: str) -> None:
    """Eight tabs on the real engine, until all have their answers."""
    from mlxbatch.config import EngineConfig
    from mlxbatch.history.store import HistoryStore
    from mlxbatch.process.launcher import LaunchOptions
    from mlxbatch.tui.app import ChatApp
    from mlxbatch.tui.chat.workspace import Workspace
    from mlxbatch.tui.open_engine import link_factory

    sampling: dict[str, object] = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
    factory = link_factory(EngineConfig(model=model, max_num_seqs=TABS), LaunchOptions())
    workspace = Workspace(HistoryStore(folder / "history.sqlite3"), factory, model, sampling=sampling)
    workspace.restore()
    app = ChatApp(workspace)

    async def drive() -> None:
        for number in range(TABS):
            app.chat_screen.composer.insert(question(number))
            app.chat_screen.send(question(number))
            if number < TABS - 1:
                await app.chat_screen.action_new_tab()
        await asyncio.sleep(1.0)
        while workspace.streaming:
            await asyncio.sleep(0.2)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        (folder / "figures.json").write_text(json.dumps({"cpu seconds": usage.ru_utime + usage.ru_stime}))
        app.exit()

    app.call_later(lambda: app.run_worker(drive()))
    app.run()
    if app.return_code:
        raise SystemExit(app.return_code)


def question(number: int) -> str:
    return f"Tell me {number + 3} things about rivers, in whole sentences."


# The measurements.


def scripted(seconds: float) -> int:
    print(f"{'screen':<8}{'tabs':>5}{'tok/s wanted':>14}{'tok/s shown':>13}{'share of a core':>17}")
    worst = 0.0
    for screen, tabs, rate in (("chat", 1, 100.0), ("chat", 8, 100.0), ("chat", 8, 400.0), ("engine", 8, 100.0)):
        with tempfile.TemporaryDirectory(prefix="mlxbatch-") as folder:
            command = [sys.executable, __file__, "chat", folder, "--rate", str(rate), "--tabs", str(tabs)]
            command += ["--seconds", str(seconds), "--screen", screen]
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            InTerminal(command, environment).wait(seconds + 120)
            figures = json.loads((Path(folder) / "figures.json").read_text())
        print(
            f"{screen:<8}{tabs:>5}{rate:>14.0f}{figures['tokens a second']:>13.1f}"
            f"{figures['share of a core']:>17.2f}",
            flush=True,
        )
        if rate == 100.0:
            worst = max(worst, figures["share of a core"])
    print(f"at 100 tokens a second: {worst:.2f} of a core at most (aim: under 0.50)")
    return 0 if worst < 0.5 else 1


def engine(rounds: int, model: str) -> int:
    """p99 of decode steps with eight rows, beside the chat and beside a client without a screen, in turn."""
    steps: dict[str, list[float]] = {"chat": [], "headless": []}
    spent: list[float] = []
    with tempfile.TemporaryDirectory(prefix="mlxbatch-") as runtime:
        environment = {**os.environ, "XDG_RUNTIME_DIR": runtime, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        environment |= dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        program = str(Path(sys.executable).parent / "mlxbatch")
        start = [program, "engine", "start", "-m", model, "--max-num-seqs", str(TABS)]
        subprocess.run(start, env=environment, check=True, capture_output=True)
        try:
            for round_number in range(rounds):
                for kind in ("headless", "chat") if round_number % 2 else ("chat", "headless"):
                    with tempfile.TemporaryDirectory(prefix="mlxbatch-") as folder:
                        watcher = [sys.executable, __file__, "steps", folder, "--model", model]
                        watching = subprocess.Popen(watcher, env=environment, stdin=subprocess.PIPE)
                        reader = [sys.executable, __file__, f"{kind}-reader", folder, "--model", model]
                        try:
                            InTerminal(reader, environment).wait(1800)
                        finally:
                            watching.communicate(b"stop\n", timeout=60)
                        steps[kind] += json.loads((Path(folder) / "steps.json").read_text())
                        if kind == "chat":
                            spent.append(json.loads((Path(folder) / "figures.json").read_text())["cpu seconds"])
        finally:
            subprocess.run([program, "engine", "stop", "--force"], env=environment, capture_output=True, check=False)
    p99 = {kind: percentile(values, 0.99) for kind, values in steps.items()}
    print(f"{'reader':<10}{'steps':>7}{'p50':>10}{'p99':>10}")
    for kind, values in steps.items():
        print(f"{kind:<10}{len(values):>7}{percentile(values, 0.5) * 1000:>7.0f} ms{p99[kind] * 1000:>7.0f} ms")
    ratio = p99["chat"] / p99["headless"]
    print(f"p99 beside the chat over p99 beside a client without a screen: {ratio:.2f} (aim: at most 1.25)")
    print(f"processor seconds of the interface, start included: {', '.join(f'{value:.1f}' for value in spent)}")
    return 0 if ratio <= 1.25 else 1


async def read_headless(model: str) -> None:
    """The same eight requests, read and thrown away."""
    from mlxbatch.config import EngineConfig
    from mlxbatch.process.launcher import LaunchOptions
    from mlxbatch.process.messages import Submit
    from mlxbatch.request import OutputDelta
    from mlxbatch.tui.open_engine import link_factory

    link = link_factory(EngineConfig(model=model, max_num_seqs=TABS), LaunchOptions())(model)
    await link.start()
    params = {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}
    for number in range(TABS):
        messages: list[dict[str, object]] = [{"role": "user", "content": question(number)}]
        await link.submit(Submit(request_id=str(number), messages=messages, params=params, priority=0))
    unfinished = TABS
    async for event in link.events():
        if isinstance(event, OutputDelta) and event.finish_reason:
            unfinished -= 1
            if not unfinished:
                break
    await link.close()


async def watch_steps(folder: Path, model: str) -> None:
    """Durations of the decode steps with all rows, from the engine's snapshots, until told to stop."""
    from mlxbatch.config import EngineConfig
    from mlxbatch.engine.snapshot import Snapshot
    from mlxbatch.process.launcher import LaunchOptions
    from mlxbatch.tui.open_engine import link_factory

    link = link_factory(EngineConfig(model=model), LaunchOptions(), kind="top", start_engine=False)(model)
    await link.start()
    seen: dict[int, float] = {}
    newest: int | None = None

    async def read() -> None:
        nonlocal newest
        async for event in link.events():
            if isinstance(event, Snapshot):
                if newest is None:  # what the tape already holds belongs to an earlier round
                    newest = max((mark.step for mark in event.steps), default=-1)
                for mark in event.steps:
                    if mark.step > newest and mark.decode_rows == TABS and not mark.prefill_tokens:
                        seen[mark.step] = mark.seconds
                newest = max([newest, *(mark.step for mark in event.steps)])

    reading = asyncio.create_task(read())
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(1.0)
    reading.cancel()
    await link.close()
    (folder / "steps.json").write_text(json.dumps(list(seen.values())))


def percentile(values: list[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["scripted", "engine", "chat", "steps", "chat-reader", "headless-reader"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--tabs", type=int, default=TABS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--screen", default="chat")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    if args.what == "scripted":
        return scripted(args.seconds)
    if args.what == "engine":
        return engine(args.rounds, args.model)
    if args.what == "chat":
        run_scripted_chat(args.folder, args.rate, args.tabs, args.seconds, args.screen)
    elif args.what == "chat-reader":
        run_engine_chat(args.folder, args.model)
    elif args.what == "steps":
        asyncio.run(watch_steps(args.folder, args.model))
    else:
        asyncio.run(read_headless(args.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
