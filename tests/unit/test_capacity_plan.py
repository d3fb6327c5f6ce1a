"""`mlxbatch plan` from the command line, offline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxbatch.capacity.calibration import FITTED
from mlxbatch.capacity.chips import find_chip
from mlxbatch.capacity.known_models import find_shape
from mlxbatch.capacity.measured_curve import DecodePoint, MeasuredCurve
from mlxbatch.capacity.model_shape import Quantization
from mlxbatch.capacity.roofline import Roofline
from mlxbatch.capacity.rows_plan import auto_rows, plan_rows
from mlxbatch.cli.main import main
from mlxbatch.cli.model_shape import shape_of
from mlxbatch.models.catalog import load_catalog

RTX = ["plan", "-m", "llama-3.1-8b", "--chip", "rtx4090", "--memory", "24GB", "--reserve", "0"]


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_sixteen_sequences_do_not_fit_beside_float16_weights_on_24_gb(capsys: Any) -> None:
    result = plan(capsys, *RTX)
    assert result["bytes"]["weights"] == 16_060_522_496
    assert result["bytes"]["KV payload"] == 8_589_934_592
    assert result["memory"] == result["usable"] == 24_000_000_000
    assert not result["fits"]
    assert result["missing"] == result["total"] - 24_000_000_000 > 0
    ways = "\n".join(result["ways_out"])
    for word in ("fewer sequences", "shorter context", "8-bit KV: 4,294,967,296 bytes", "two such machines"):
        assert word in ways


def test_eight_sequences_fit_and_so_do_sixteen_in_eight_bits(capsys: Any) -> None:
    assert plan(capsys, *RTX, "--seqs", "8")["fits"]
    small = plan(capsys, *RTX, "--kv-bits", "8")
    assert small["fits"]
    assert small["bytes"]["KV payload"] == 4_294_967_296
    assert small["bytes"]["KV scales"] > 0
    assert small["bytes"]["KV tails"] == plan(capsys, *RTX)["bytes"]["KV tails"]


def test_what_is_promised_to_fit_does_and_one_more_does_not(capsys: Any) -> None:
    result = plan(capsys, *RTX)
    most = result["most_sequences"]
    assert plan(capsys, *RTX, "--seqs", str(most))["fits"]
    assert not plan(capsys, *RTX, "--seqs", str(most + 1))["fits"]
    longest = result["most_context"]
    assert plan(capsys, *RTX, "--context", str(longest))["fits"]
    assert not plan(capsys, *RTX, "--context", str(longest + 16))["fits"]


def test_the_table_names_every_item(capsys: Any) -> None:
    assert main(RTX) == 0
    text = capsys.readouterr().out
    for word in ("8,589,934,592", "16,060,522,496", "KV tails", "growth of one array", "Does not fit", "Ways out"):
        assert word in text


def test_a_mixture_shows_its_experts(capsys: Any) -> None:
    result = plan(capsys, "plan", "-m", "mixtral-8x7b", "--chip", "m2-ultra", "--weight-bits", "4")
    curve = result["rows"]["curve"]
    assert curve[0]["experts"] == pytest.approx(2)
    assert curve[1]["experts"] == pytest.approx(3.5)
    gains = [line["gain"] / line["rows"] for line in curve]
    assert gains[0] == 1.0
    assert gains[-1] < 0.3
    assert result["rows"]["default_max_num_seqs"] == 16
    assert main(["plan", "-m", "mixtral-8x7b", "--chip", "m2-ultra"]) == 0
    assert "experts touched" in capsys.readouterr().out


def test_bits_default_to_those_of_the_model(capsys: Any) -> None:
    stored = plan(capsys, "plan", "-m", "mlx-community/Qwen3-8B-4bit", "--chip", "m4-max")
    assert stored["weight_bits"] == 4
    forced = plan(capsys, "plan", "-m", "mlx-community/Qwen3-8B-4bit", "--chip", "m4-max", "--weight-bits", "16")
    assert forced["bytes"]["weights"] > 3 * stored["bytes"]["weights"]
    assert forced["rows"]["curve"][0]["seconds"] > 2 * stored["rows"]["curve"][0]["seconds"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plots(capsys: Any, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"plan.{ending}"
    assert main([*RTX, "--plot", str(path)]) == 0
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seqs", "0"], "at least 1"),
        (["--memory", "lots"], "size"),
        (["--chip", "m9"], "unknown chip"),
        (["--plot", "x.gif"], "must end in .png"),
        (["--gpu-memory-utilization", "2"], "at most 1"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(capsys: Any, arguments: list[str], words: str) -> None:
    assert main(["plan", "-m", "llama-3.1-8b", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_planning_loads_no_mlx_and_needs_no_network() -> None:
    code = (
        "import sys, socket\n"
        "socket.socket.connect = None\n"
        "from mlxbatch.cli.main import main\n"
        "assert main(['plan', '-m', 'smollm2-135m', '--chip', 'm1']) == 0\n"
        "assert not {'mlx', 'mlx.core', 'transformers', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# -- max_num_seqs=auto -------------------------------------------------------------------------------------


def test_auto_rows_before_any_measurement() -> None:
    ultra = find_chip("m2-ultra")
    assert auto_rows(ultra, moe=False).rows == 32
    assert auto_rows(ultra, moe=True).rows == 16
    assert auto_rows(find_chip("m2"), moe=False).rows == 16
    assert auto_rows(None, moe=False).rows == 16
    assert auto_rows(ultra, moe=False, most=5).rows == 5


def test_auto_rows_keep_to_the_target_that_the_roofline_predicts() -> None:
    ultra, shape = find_chip("m2-ultra"), find_shape("llama-3.1-70b")
    roof = Roofline(shape, ultra, FITTED, quantization=Quantization(4))
    cap = auto_rows(ultra, moe=False, times=roof, tpot_target=0.1)
    assert 1 <= cap.rows < 32
    assert roof.seconds(cap.rows, 0, 1024) <= 0.1
    assert auto_rows(ultra, moe=False, times=roof, tpot_target=10.0).rows == 32


def test_a_measured_curve_replaces_the_table() -> None:
    points = tuple(DecodePoint(r, 64, 1.0 if r <= 12 else 2.0) for r in range(1, 25))
    curve = MeasuredCurve("m", "c", points, measured_at="2026-01-02")
    cap = auto_rows(find_chip("m2-ultra"), moe=False, curve=curve)
    assert cap.rows == 12
    assert "2026-01-02" in cap.reason


def test_s_and_cap_are_reported_apart() -> None:
    shape = find_shape("llama-3.1-8b")
    roof = Roofline(shape, find_chip("m2-ultra"), FITTED, quantization=Quantization(4))
    plan = plan_rows(roof, shape, 1024)
    assert plan.cap.rows == 32
    assert plan.saturation.s != plan.cap.rows


def test_every_catalog_name_can_be_planned_as_it_would_be_loaded() -> None:
    for name, entry in load_catalog().items():
        shape = shape_of(name)
        assert not shape.approximate, name
        assert shape.weight_bytes(shape.quantization) < entry.memory_gb * 2**30, name
    assert shape_of("qwen3-8b").quantization == Quantization(4, 64)
    assert shape_of("Qwen/Qwen3-8B").quantization is None


def test_a_gguf_file_is_planned_from_its_header(tmp_path: Path) -> None:
    import tiny_gguf
    from mlx.utils import tree_flatten

    config = tiny_gguf.config_of("qwen3")
    model = tiny_gguf.build(config)
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "qwen3", model, config)
    shape = shape_of(str(path))
    assert (shape.name, shape.model_type) == ("tiny", "qwen3")
    assert shape.params == sum(array.size for _, array in tree_flatten(model.parameters()))
