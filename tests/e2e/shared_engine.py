"""Two `mlxbatch chat` and one `mlxbatch run` on one engine, in every order of starting and ending.

    python tests/e2e/shared_engine.py                     SmolLM2-135M
    python tests/e2e/shared_engine.py --model tiny        a tiny random llama

The engine has as few rows as the run fills, so a chat finds no free slot and takes one from the batch. Printed is the
engine's own time to first token of each chat, alone and beside the run. Checked are: one engine process; no client
has MLX loaded; chats end while the run still has rows to go; every answer equals the one without company.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from e2e.kill_engine import tiny_model

from mlxbatch.config import EngineConfig
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.control import stop_engine
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.registry import Registry

QUESTIONS = ("What is the capital of France?", "Name three colours of the rainbow.")
ROWS = 4
COMPARED = 12  # answers of the run that are compared with those of a run alone


@dataclass
class Setup:
    """A private place for one user's engines, and the command line in it."""

    folder: Path
    model: str
    run_requests: int
    run_tokens: int
    chat_tokens: int
    environ: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        places = {f"XDG_{name}_HOME": str(self.folder / name.lower()) for name in ("STATE", "DATA", "CONFIG")}
        (self.folder / "r").mkdir(mode=0o700)
        self.environ = os.environ | places | {"XDG_RUNTIME_DIR": str(self.folder / "r")}
        lines = [{"id": f"q-{n}", "prompt": f"Question {n}: tell me about it"} for n in range(self.run_requests)]
        (self.folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    @property
    def runtime(self) -> RuntimeDir:
        return RuntimeDir(self.folder / "r" / "mlxbatch", self.folder / "state" / "mlxbatch" / "log").prepared()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "mlxbatch.cli.main", *arguments]
        common = ["-m", self.model, "--max-num-seqs", str(ROWS), "--temperature", "0"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*command, *common], env=self.environ, cwd=self.folder, stdout=pipe, stderr=pipe, text=True
        )

    def chat(self, question: str) -> subprocess.Popen[str]:
        return self.start("chat", "-p", question, "--max-tokens", str(self.chat_tokens))

    def run(self, output: str, limit: int) -> subprocess.Popen[str]:
        flags = ["-i", "in.jsonl", "-o", output, "--overwrite", "--max-tokens", str(self.run_tokens)]
        return self.start("run", *flags, "--limit", str(limit), "-q")


class Watcher:
    """Reads the engine's snapshots on a thread of its own: who runs, and the first-token times of chats."""

    def __init__(self, setup: Setup) -> None:
        self._engine = ProcessEngine(
            Launcher(EngineConfig(model=setup.model, max_num_seqs=ROWS), runtime=setup.runtime), kind="top"
        )
        self.pid = self._engine.engine_pid
        self.ttft: dict[str, float] = {}  # by engine-wide request id
        self.run_rows = 0  # of the run, running or waiting
        self.preemptions = 0
        self.batch_started = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            snapshot = self._engine.snapshot()
            rows = [slot for slot in snapshot.slots if slot.priority == 1]
            self.run_rows = sum(client.requests for client in snapshot.clients if client.kind == "run")
            self.preemptions = snapshot.counters.preemptions
            if any(slot.output_tokens > 0 for slot in rows):
                self.batch_started.set()
            for slot in snapshot.slots:
                if slot.priority == 0 and slot.ttft is not None:
                    self.ttft[slot.request_id] = slot.ttft

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._engine.close()


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"{process.args} ended with {process.returncode}: {err}")
    return out


def has_mlx(pid: int) -> bool:
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and "libmlx" in maps.read_text()


def check_clients(setup: Setup, watcher: Watcher, processes: list[subprocess.Popen[str]]) -> None:
    live = Registry(setup.runtime).live()
    if [record.pid for record in live] != [watcher.pid]:
        raise SystemExit(f"expected the one engine {watcher.pid}, found {live}")
    if any(process.poll() is None and has_mlx(process.pid) for process in processes):
        raise SystemExit("a client has loaded MLX")
    if sys.platform == "linux" and not has_mlx(watcher.pid):
        raise SystemExit("the engine has not loaded MLX: this check sees nothing")


@contextmanager
def watching(setup: Setup) -> Iterator[Watcher]:
    watcher = Watcher(setup)
    try:
        yield watcher
    finally:
        watcher.close()


def milliseconds(values: dict[str, float]) -> str:
    if len(values) != len(QUESTIONS):
        raise SystemExit(f"expected the first-token times of {len(QUESTIONS)} chats, saw {values}")
    return ", ".join(f"{1000 * value:.0f} ms" for value in values.values())


def chats_alone(setup: Setup, tell: Callable[[str], None]) -> list[str]:
    """The first chat starts the engine, the second joins it."""
    chats = [setup.chat(question) for question in QUESTIONS]
    with watching(setup) as watcher:
        check_clients(setup, watcher, chats)
        answers = [finish(chat) for chat in chats]
        # Again, now that the engine is warm: this is the figure to compare with.
        watcher.ttft.clear()
        for question in QUESTIONS:
            finish(setup.chat(question))
        tell(f"chats alone: TTFT {milliseconds(watcher.ttft)}")
    return answers


def run_first(setup: Setup, expected: list[str], tell: Callable[[str], None]) -> str:
    """The run starts the engine; chats come while its rows fill every slot, and end before it. It is then stopped."""
    run = setup.run("first.jsonl", setup.run_requests)
    with watching(setup) as watcher:
        if not watcher.batch_started.wait(300):
            raise SystemExit("the run did not begin")
        chats = [setup.chat(question) for question in QUESTIONS]
        check_clients(setup, watcher, [run, *chats])
        answers = [finish(chat) for chat in chats]
        left = watcher.run_rows
        if answers != expected:
            raise SystemExit(f"answers beside a run differ: {answers} from {expected}")
        if run.poll() is not None:
            raise SystemExit("the run ended before the chats: make it longer (--requests)")
        tell(
            f"run first, then chats: TTFT {milliseconds(watcher.ttft)} with {left} rows of the run to go, "
            f"{watcher.preemptions} preemptions"
        )
        output = setup.folder / "first.jsonl"
        while output.read_text().count("\n") < 2 * COMPARED and run.poll() is None:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGINT)
        run.communicate()
    return output.read_text()


def chat_first(setup: Setup, expected: list[str], tell: Callable[[str], None]) -> None:
    """A chat starts the engine; the run joins it, and ends first while a chat still streams."""
    first = setup.chat(QUESTIONS[0])
    with watching(setup) as watcher:
        finish(first)
        run = setup.run("second.jsonl", 2)
        if not watcher.batch_started.wait(300):
            raise SystemExit("the run did not begin")
        watcher.ttft.clear()
        chats = [setup.chat(question) for question in QUESTIONS]
        check_clients(setup, watcher, [run, *chats])
        finish(run)
        answers = [finish(chat) for chat in chats]
        if answers != expected:
            raise SystemExit(f"answers beside a run differ: {answers} from {expected}")
        check_clients(setup, watcher, [])
        tell(f"chat first, then run, which ends first: TTFT {milliseconds(watcher.ttft)}")


def records_of(text: str) -> dict[str, str]:
    return {record["custom_id"]: record["text"] for record in map(json.loads, text.splitlines())}


def stop_all(setup: Setup) -> None:
    for record in Registry(setup.runtime).live():
        stop_engine(record, setup.runtime, force=True)


def shared(setup: Setup, tell: Callable[[str], None] = print) -> None:
    """Ends the script at the first thing that is not as it should be."""
    try:
        expected = chats_alone(setup, tell)
        stop_all(setup)
        beside_chats = run_first(setup, expected, tell)
        stop_all(setup)
        chat_first(setup, expected, tell)
        finish(setup.run("alone.jsonl", COMPARED))
        alone = records_of((setup.folder / "alone.jsonl").read_text())
        beside = records_of(beside_chats)
        compared = alone.keys() & beside.keys()
        differing = [(name, alone[name], beside[name]) for name in compared if alone[name] != beside[name]]
        if len(compared) < ROWS or differing:
            raise SystemExit(f"{len(compared)} answers of the run compared, differing beside chats: {differing}")
        tell("one engine each time, no client loaded MLX, every answer as without company")
    finally:
        stop_all(setup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="as for -m, or tiny")
    parser.add_argument("--requests", type=int, default=400, help="rows of the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxb-") as name:
        folder = Path(name)
        model = tiny_model(folder) if options.model == "tiny" else options.model
        tokens = 96 if options.model == "tiny" else 24  # long enough to be seen while it runs
        setup = Setup(folder, model, run_requests=options.requests, run_tokens=64, chat_tokens=tokens)
        shared(setup, tell=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
