"""kill -9 a batch run at random moments, resume it, and see every id exactly once.

    python tests/e2e/kill_resume.py --cycles 200                    the engine without a model
    python tests/e2e/kill_resume.py --cycles 200 --engine tiny      a tiny random llama through MLX

A cycle starts `mlxbatch run --resume` and kills it after a random time, mostly while it writes. After each kill the
output may hold no id twice, and every whole record must equal that of an undisturbed run. A run that ends by itself
is checked for completeness and a new output is begun. Runs are forked from a server that has imported what they
need, so that a cycle costs no second for imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

Answers = dict[str, str]
PRELOADED = {
    "fake": ["fake_run", "mlxbatch.batch.session"],
    "tiny": ["mlxbatch.batch.session", "mlxbatch.engine.local"],
}


def run_in_child(engine: str, folder: Path, arguments: list[str]) -> None:
    """`mlxbatch run` in the process that is to be killed."""
    from mlxbatch.cli import run
    from mlxbatch.cli.main import main

    os.chdir(folder)
    os.environ["MLXBATCH_CONFIG"] = str(folder / "none.toml")
    if engine == "fake":
        from fake_run import open_fake_engine

        run.engine_opener = lambda args, reporter, launch: open_fake_engine
    sys.exit(main(["run", *arguments]))


@dataclass
class Tally:
    kills: int = 0
    before_first_record: int = 0  # kills of a run that had written nothing yet
    torn: int = 0  # kills in the middle of a record
    completed: int = 0


@dataclass
class Rig:
    """One input, the engine that answers it, and what its undisturbed run gave."""

    engine: str
    folder: Path
    requests: int
    seed: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.out = self.folder / "out.jsonl"
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED[self.engine])
        self.start_server()
        with (self.folder / "in.jsonl").open("w") as file:
            for number in range(self.requests):
                file.write(json.dumps({"id": f"id-{number}", "prompt": f"Request number {number}"}) + "\n")
        began = time.monotonic()
        process = self.start("undisturbed.jsonl")
        while process.is_alive() and not _size(self.folder / "undisturbed.jsonl"):
            time.sleep(0.005)
        self.first_seconds = time.monotonic() - began  # until the first record
        process.join()
        self.whole_seconds = time.monotonic() - began
        self.expected = answers_in(self.folder / "undisturbed.jsonl")
        if process.exitcode != 0 or len(self.expected) != self.requests:
            raise SystemExit(f"the undisturbed run failed with exit code {process.exitcode}")

    def start_server(self) -> None:
        """Once, so that its imports do not count as a run's time."""
        process = self.context.Process(target=os.getpid)
        process.start()
        process.join()

    def start(self, output: str) -> BaseProcess:
        arguments = ["-i", "in.jsonl", "-o", output, "--resume", "--temperature", "0", "-q"]
        if self.engine == "tiny":
            arguments += ["--in-process", "-m", "model", "--max-tokens", "12"]
        process = self.context.Process(target=run_in_child, args=(self.engine, self.folder, arguments))
        process.start()
        return process

    def cycle(self) -> None:
        """Start or resume, kill, check."""
        before = _size(self.out)
        process = self.start(self.out.name)
        if self.random.random() < 0.2:
            delay = self.random.uniform(0, self.first_seconds)  # while it starts
        else:
            while process.is_alive() and _size(self.out) <= before:
                time.sleep(0.002)
            delay = self.random.uniform(0, self.whole_seconds - self.first_seconds)  # while it writes
        process.join(delay)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode == -signal.SIGKILL:
            self.tally.kills += 1
            self.tally.before_first_record += _size(self.out) <= before
            self.tally.torn += bool(_size(self.out)) and not self.out.read_bytes().endswith(b"\n")
            self.check(complete=False)
        elif process.exitcode == 0:
            self.complete()
        else:
            raise SystemExit(f"a run ended with exit code {process.exitcode}")

    def complete(self) -> None:
        self.check(complete=True)
        self.tally.completed += 1
        for path in self.folder.glob(self.out.name + "*"):
            path.unlink()

    def check(self, *, complete: bool) -> None:
        found = answers_in(self.out)
        wrong = [custom_id for custom_id, text in found.items() if self.expected.get(custom_id) != text]
        if wrong:
            raise SystemExit(f"{len(wrong)} answers differ from the undisturbed run, first {wrong[0]}")
        if complete and len(found) != self.requests:
            raise SystemExit(f"{self.requests - len(found)} ids are lost")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def answers_in(path: Path) -> Answers:
    """The whole records of an output by id. Ends the script when an id is there twice."""
    found: Answers = {}
    if not path.exists():
        return found
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            record = json.loads(line)
            if record["custom_id"] in found:
                raise SystemExit(f"{record['custom_id']} is there twice")
            found[record["custom_id"]] = record["text"]
    return found


def write_tiny_model(folder: Path) -> None:
    from mlxbatch.execution.backend import prepare_backend

    prepare_backend()
    from tiny_models import write_dir

    write_dir("llama", folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--engine", choices=("fake", "tiny"), default="fake")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxbatch-kill-") as name:
        folder = Path(name)
        if options.engine == "tiny":
            write_tiny_model(folder / "model")
        rig = Rig(options.engine, folder, options.requests, options.seed)
        while rig.tally.kills < options.cycles:
            rig.cycle()
            if rig.tally.kills % 20 == 0:
                print(f"{rig.tally.kills} of {options.cycles} kills", file=sys.stderr)
        if rig.out.exists():
            last = rig.start(rig.out.name)
            last.join()
            if last.exitcode != 0:
                raise SystemExit("the last resume failed")
            rig.complete()
        tally = rig.tally
        print(
            f"{tally.kills} kills of a run of {rig.requests} requests ({rig.whole_seconds:.1f} s undisturbed): "
            f"{tally.before_first_record} before a first new record, {tally.torn} in the middle of one; "
            f"{tally.completed} outputs completed, no id lost, none doubled"
        )


if __name__ == "__main__":
    main()
