"""`mlxbatch simulate` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxbatch.cli.main import main

BASE = ["simulate", "-m", "llama-3.1-8b", "--output-lengths", "20", "--requests", "30", "-q"]


def simulate(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main([*BASE, *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_rates_by_rows_by_method(capsys: Any) -> None:
    result = simulate(capsys, "--rate", "1/s,4/s", "--max-num-seqs", "8,32", "--compare")
    runs = {(r["rate"], r["rows"], r["method"]): r for r in result["runs"]}
    assert len(runs) == 2 * 2 * 4
    for run in runs.values():
        assert run["requests"] == 30
        assert run["output_tokens"] == 600
        assert 0.0 <= run["goodput"] <= 1.0
        assert 0.0 < run["occupancy"] <= 1.0
    assert runs[1.0, 8, "mlxbatch"]["goodput"] >= runs[1.0, 8, "static"]["goodput"]


def test_rows_default_to_the_cap_of_the_chip_and_the_target(capsys: Any) -> None:
    assert simulate(capsys)["runs"][0]["rows"] == 32
    assert simulate(capsys, "--tpot-target", "20ms")["runs"][0]["rows"] < 8
    assert simulate(capsys, "--chip", "m2")["runs"][0]["rows"] == 3


def test_the_same_seed_gives_the_same_result(capsys: Any) -> None:
    first, again, other = (simulate(capsys, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_trace(capsys: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(f'{{"arrival": {i}, "prompt_tokens": 50, "output_tokens": 5}}' for i in range(4)))
    (run,) = simulate(capsys, "--arrivals", "trace", str(trace))["runs"]
    assert (run["rate"], run["requests"], run["prompt_tokens"]) == (None, 4, 200)


def test_a_shared_prefix_is_computed_once(capsys: Any) -> None:
    plain = simulate(capsys, "--rate", "4/s", "--prompt-lengths", "1024")["runs"][0]
    shared = simulate(capsys, "--rate", "4/s", "--prompt-lengths", "24", "--shared-prefix", "1000")["runs"][0]
    assert shared["prompt_tokens"] == plain["prompt_tokens"]
    assert shared["busy_seconds"] < plain["busy_seconds"] / 2


def test_table_and_plot(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "study.svg"
    assert main([*BASE, "--rate", "1/s,2/s", "--plot", str(path)]) == 0
    assert "mlxbatch" in capsys.readouterr().out
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "many"], "not a rate"),
        (["--max-num-seqs", "0"], "from 1 to 256"),
        (["--max-num-seqs", "8,x"], "with commas"),
        (["--arrivals", "bursty"], "poisson, or trace FILE"),
        (["--memory", "8GB", "--weight-bits", "16"], "leaves no room"),
        (["--prompt-lengths", "some"], "as lengths"),
        (["--kv-memory", "1KB"], "not even one block"),
        (["--interactive", "7"], "--interactive must be from 0 to 1"),
        (["--interactive", "nan"], "--interactive must be from 0 to 1"),
        (["--jitter=-1"], "--jitter"),
        (["--jitter", "nan"], "--jitter"),
        (["--requests", "0"], "at least 1"),
        (["--shared-prefix=-3"], "0 or more"),
        (["--max-num-batched-tokens", "16"], "at least 17"),
        (["--max-num-batched-tokens", "20", "--max-num-seqs", "2,8"], "at least 24"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(capsys: Any, arguments: list[str], words: str) -> None:
    assert main([*BASE, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_simulating_loads_no_mlx() -> None:
    code = (
        "import sys\n"
        "from mlxbatch.cli.main import main\n"
        "assert main(['simulate', '-m', 'smollm2-135m', '--requests', '5', '-q']) == 0\n"
        "assert not {'mlx', 'mlx.core', 'transformers', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.slow
def test_ten_thousand_requests() -> None:
    """How long it takes is printed by the command; here it must only come to an end with every answer."""
    code = (
        "import json, io, contextlib\n"
        "from mlxbatch.cli.main import main\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out):\n"
        "    main(['simulate', '-m', 'llama-3.1-8b', '--requests', '10000', '--rate', '1.5/s', '-q', '--json'])\n"
        "assert json.loads(out.getvalue())['runs'][0]['requests'] == 10000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
