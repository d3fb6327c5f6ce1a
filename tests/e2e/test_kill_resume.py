"""A run killed at any moment and resumed holds every id exactly once."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from mlxbatch.batch.item import RequestDefaults
from mlxbatch.batch.output import OutputOptions
from mlxbatch.batch.progress import SilentReporter
from mlxbatch.batch.session import RunOptions, run_batch
from mlxbatch.config import EngineConfig

LINES = [
    {"id": "first", "prompt": "LONG"},
    {"id": "broken", "prompt": "BREAK"},
    {"id": "wrong", "prompt": "x", "foo": 1},
    *({"id": f"id-{n}", "prompt": f"Zwölf {n}", "max_tokens": 4} for n in range(8)),
    {"id": "id-0", "prompt": "a duplicate"},
]


def run(folder: Path, errors: Path | None, order: str) -> int:
    options = RunOptions(
        input=str(folder / "in.jsonl"),
        output=OutputOptions(folder / "out.jsonl", errors, resume=True),
        config=EngineConfig(),
        defaults=RequestDefaults(temperature=0.0),
        order=order,  # type: ignore[arg-type]
    )
    return run_batch(options, lambda config, **ignored: FakeEngine(config), SilentReporter(), None)


def summary(*paths: Path) -> list[tuple[str | None, str]]:
    """(id, answer or error code) of every record, sorted."""
    records = [json.loads(line) for path in paths for line in path.read_bytes().splitlines()]
    found = [(r["custom_id"], r["text"] if "text" in r else r["error"]["code"]) for r in records]
    return sorted(found, key=repr)


@pytest.mark.parametrize("order", ["completion", "input"])
def test_a_run_cut_at_any_byte_is_completed(tmp_path: Path, order: str) -> None:
    """The file is append-only, so what a kill leaves is a prefix of it: those around line ends, and some between."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    out = tmp_path / "out.jsonl"
    assert run(tmp_path, None, order) == 1
    whole, expected = out.read_bytes(), summary(out)
    assert len(expected) == len(LINES)
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {end + offset for end in ends for offset in (-1, 0, 1, 2)} | set(range(0, len(whole), 37))
    for length in sorted(cut for cut in cuts if cut <= len(whole)):
        out.write_bytes(whole[:length])
        assert run(tmp_path, None, order) == 1
        assert summary(out) == expected, length


def test_a_run_with_two_files_cut_anywhere_is_completed(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    files = (tmp_path / "out.jsonl", tmp_path / "errors.jsonl")
    assert run(tmp_path, files[1], "completion") == 1
    wholes, expected = [path.read_bytes() for path in files], summary(*files)
    choose = random.Random(0)
    for _ in range(40):
        for path, whole in zip(files, wholes, strict=True):
            path.write_bytes(whole[: choose.randrange(len(whole) + 1)])
        assert run(tmp_path, files[1], "completion") == 1
        assert summary(*files) == expected


def test_kill_9_of_the_process(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_resume.py")
    done = subprocess.run(
        [sys.executable, str(script), "--cycles", "4", "--requests", "500"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "no id lost, none doubled" in done.stdout
