"""kill -9 a batch run at random moments, resume it, and see every id exactly once.

    python tests/e2e/kill_resume.py --cycles 200                    the engine without a model
    python tests/e2e/kill_resume.py --cycles 200 --engine tiny      a tiny random llama through MLX

A cycle starts `mlxbatch run --resume` and kills it after a random time, mostly while it writes. After each kill the
output may hold no id twice, and every whole record must equal that of an undisturbed run. A run that ends by itself
is checked for completeness and a new output is begun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
Answers = dict[str, str]


@dataclass
class Tally:
    kills: int = 0
    before_first_record: int = 0  # kills of a run that had written nothing yet
    torn: int = 0  # kills in the middle of a record
    completed: int = 0


@dataclass
class Rig:
    """One input, the command that answers it, and what its undisturbed run gave."""

    folder: Path
    command: list[str]
    requests: int
    seed: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.out = self.folder / "out.jsonl"
        self.environ = os.environ | {"MLXBATCH_CONFIG": str(self.folder / "none.toml")}
        with (self.folder / "in.jsonl").open("w") as file:
            for number in range(self.requests):
                file.write(json.dumps({"id": f"id-{number}", "prompt": f"Request number {number}"}) + "\n")
        began = time.monotonic()
        process = self.start("undisturbed.jsonl")
        while process.poll() is None and not _size(self.folder / "undisturbed.jsonl"):
            time.sleep(0.005)
        self.first_seconds = time.monotonic() - began  # until the first record
        code = process.wait()
        self.whole_seconds = time.monotonic() - began
        self.expected = answers_in(self.folder / "undisturbed.jsonl")
        if code != 0 or len(self.expected) != self.requests:
            raise SystemExit(f"the undisturbed run failed with exit code {code}")

    def start(self, output: str) -> subprocess.Popen[bytes]:
        flags = ["-i", "in.jsonl", "-o", output, "--resume", "--temperature", "0", "-q"]
        return subprocess.Popen([*self.command, *flags], cwd=self.folder, env=self.environ)

    def cycle(self) -> None:
        """Start or resume, kill, check."""
        before = _size(self.out)
        process = self.start(self.out.name)
        if self.random.random() < 0.2:
            delay = self.random.uniform(0, self.first_seconds)  # while it starts
        else:
            while process.poll() is None and _size(self.out) <= before:
                time.sleep(0.002)
            delay = self.random.uniform(0, self.whole_seconds - self.first_seconds)  # while it writes
        try:
            code = process.wait(delay)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            self.tally.kills += 1
            self.tally.before_first_record += _size(self.out) <= before
            self.tally.torn += bool(_size(self.out)) and not self.out.read_bytes().endswith(b"\n")
            self.check(complete=False)
            return
        if code != 0:
            raise SystemExit(f"a run ended with exit code {code}")
        self.complete()

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


def command_for(engine: str, folder: Path) -> list[str]:
    if engine == "fake":
        return [sys.executable, str(HERE / "fake_run.py"), "run"]
    from mlxbatch.execution.backend import prepare_backend

    prepare_backend()
    sys.path.insert(0, str(HERE.parent))
    from tiny_models import write_dir

    write_dir("llama", folder / "model")
    return [sys.executable, "-m", "mlxbatch.cli.main", "run", "-m", "model", "--max-tokens", "24", "--in-process"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--engine", choices=("fake", "tiny"), default="fake")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxbatch-kill-") as name:
        folder = Path(name)
        rig = Rig(folder, command_for(options.engine, folder), options.requests, options.seed)
        while rig.tally.kills < options.cycles:
            rig.cycle()
            if rig.tally.kills % 20 == 0:
                print(f"{rig.tally.kills} of {options.cycles} kills", file=sys.stderr)
        if rig.out.exists():
            if rig.start(rig.out.name).wait() != 0:
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
