"""MLX itself takes every call of our kernels, and would compile the very text that the bench runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from bench import Bench
from scene import Case, run_decode, run_prefill
from test_bench_signature import captured
from test_matmul import matmul

from mlxbatch.execution.attention.metal import MetalAttention
from mlxbatch.execution.attention.metal_source import Kernel, KernelFactory
from mlxbatch.execution.quantized_linear import CUTS


def run_attention(factory: KernelFactory) -> None:
    for case in (Case(dtype="bfloat16", sinks=True), Case(bits=4), Case(latent=True, group=16)):
        attention = MetalAttention(factory, chunk_tokens=32, own_prefill=True)
        run_decode(attention, case, [60])  # one row: every metadata array is padded
        run_prefill(attention, case, 3, 1)


def run_matmul(factory: KernelFactory) -> None:
    matmul(factory, rows=2, outputs=8, inputs=32, bits=4, group_size=32, cut=CUTS[0])


@pytest.mark.parametrize("run", [run_attention, run_matmul])
def test_mlx_generates_the_text_of_the_bench(
    bench: Bench, tmp_path: Path, run: Callable[[KernelFactory], None]
) -> None:
    calls: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def record(**names: Any) -> Kernel:
        def call(**arguments: Any) -> list[mx.array]:
            calls.append((names, arguments))
            pairs = zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
            return [mx.zeros(tuple(shape), dtype) for shape, dtype in pairs]

        return call

    run(record)
    assert len({names["name"] for names, _ in calls}) == (4 if run is run_attention else 1)
    for names, arguments in calls:
        expected = bench.metal_kernel(**names).signature_of(**arguments).text
        text = mlx_text(names, arguments, tmp_path / "traced.mlxfn")
        assert text.strip() == expected.strip()
        assert "const constant" not in text.partition("[[kernel]]")[2].partition("{")[0], (
            "an input is too small for the device space"
        )


def mlx_text(names: dict[str, Any], arguments: dict[str, Any], file: Path) -> str:
    """Traced: MLX prints what it would compile, and needs no GPU for that."""
    kernel = mx.fast.metal_kernel(**names)

    def traced(*arrays: mx.array) -> list[mx.array]:
        return kernel(**{**arguments, "inputs": list(arrays)}, verbose=True)

    printed = captured(lambda: mx.export_function(str(file), traced, *arguments["inputs"]))
    return printed[printed.index("```\n") + 4 : printed.rindex("```")]
