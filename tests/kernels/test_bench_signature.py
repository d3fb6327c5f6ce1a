"""The bench compiles the text that MLX itself generates, character by character."""

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from bench.signature import ArrayType, dtype_name, signature

INPUTS = ["a", "b", "c", "d", "e", "f", "g"]
OUTPUTS = ["out", "out2"]
OUTPUT_DTYPES = [mx.float32, mx.bfloat16]
HEADER = "// header\n"
BODIES = [
    "out[0]=a[0];",
    "uint i=thread_position_in_grid.x; out[i]=a[i*a_strides[0]]+b_shape[0]+b_ndim+a_shape[1];",
    "threadgroup_position_in_grid; thread_index_in_simdgroup; simdgroup_index_in_threadgroup; "
    "threads_per_threadgroup; out2[0]=0; c; c_shape",
    "dispatch_threads_per_threadgroup; grid_origin; grid_size; quadgroup_index_in_threadgroup; threads_per_simdgroup",
]
TEMPLATES: list[list[tuple[str, Any]] | None] = [
    None,
    [("T", mx.bfloat16)],
    [("N", 3), ("F", True), ("G", False), ("T", mx.float16), ("M", -2)],
]


def captured(run: Callable[[], object]) -> str:
    """What `run` prints, from C++ too."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            run()
        finally:
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        return file.read().decode()


def mlx_text(source: str, inputs: list[Any], template: Any, atomic: bool, file: Path) -> str:
    """Traced: no GPU is needed to have MLX print the kernel that it would compile."""
    kernel = mx.fast.metal_kernel(
        name="k", input_names=INPUTS, output_names=OUTPUTS, source=source, header=HEADER,
        atomic_outputs=atomic, ensure_row_contiguous=False,
    )  # fmt: skip

    def traced(*arrays: mx.array) -> Any:
        given = iter(arrays)
        return kernel(
            inputs=[next(given) if isinstance(x, mx.array) else x for x in inputs],
            template=template, grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(4,), (2,)],
            output_dtypes=OUTPUT_DTYPES, verbose=True,
        )  # fmt: skip

    arrays = [x for x in inputs if isinstance(x, mx.array)]
    printed = captured(lambda: mx.export_function(str(file), traced, *arrays))
    return printed[printed.index("```\n") + 4 : printed.rindex("```")]


def array_types(inputs: Sequence[Any]) -> list[ArrayType]:
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    return [ArrayType(dtype_name(x.dtype), x.ndim, x.size) for x in arrays]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("source", BODIES, ids=range(len(BODIES)))
def test_generated_text_is_mlx_own(source: str, template: Any, atomic: bool, tmp_path: Path) -> None:
    for first, second in itertools.product([mx.float16, mx.int32, mx.bool_], [mx.bfloat16, mx.uint8, mx.complex64]):
        inputs = [
            mx.zeros((4, 5), dtype=first), mx.zeros((3,), dtype=second), 2.5, mx.array(3, dtype=mx.int64),
            mx.zeros((2, 4)), True, 7,
        ]  # fmt: skip
        made = signature(
            "k", INPUTS, OUTPUTS, source, HEADER, array_types(inputs), [dtype_name(d) for d in OUTPUT_DTYPES],
            template or (), atomic,
        )  # fmt: skip
        wanted = mlx_text(source, inputs, template, atomic, tmp_path / "kernel.mlxfn")
        assert made.text.strip() == wanted.strip()
