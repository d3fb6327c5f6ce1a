"""The text that MLX generates around the body given to `mx.fast.metal_kernel`.

Follows mlx/backend/common/metal_kernel.cpp of MLX 0.32; tests/kernels/test_bench_signature.py compares it with the
text of the installed MLX, traced through `mx.export_function`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# In the order in which MLX appends them to the signature.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
METAL_TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "complex64": "complex64_t",
}
# Arguments that an array brings along when the source mentions them: suffix, how it is declared.
METADATA = {
    "shape": "const constant int*",
    "strides": "const constant int64_t*",
    "ndim": "const constant int&",
}
# An input with fewer elements than this is passed in the constant address space.
CONSTANT_BELOW = 8


def dtype_name(dtype: object) -> str:
    """'float16' for mlx.core.float16, numpy.float16 and 'float16' alike."""
    return str(dtype).rsplit(".", 1)[-1]


@dataclass(frozen=True, slots=True)
class ArrayType:
    """What the signature depends on in an input."""

    dtype: str
    ndim: int
    size: int

    @property
    def constant(self) -> bool:
        return self.size < CONSTANT_BELOW


@dataclass(frozen=True, slots=True)
class BufferParameter:
    name: str
    space: str  # "constant" or "device"
    reference: bool
    output: bool
    source: str  # the input or output it belongs to
    part: str  # "data", "shape", "strides" or "ndim"


@dataclass(frozen=True, slots=True)
class Signature:
    header: str
    declaration: str  # the template line, if any, and the parameters up to the opening brace
    source: str  # the body
    instantiation: str
    call: str  # the kernel with its template arguments
    buffers: tuple[BufferParameter, ...]  # in order of buffer index
    attributes: tuple[str, ...]

    @property
    def text(self) -> str:
        """Everything that MLX compiles, but for its prelude."""
        return f"{self.header}{self.declaration}{self.source}\n}}\n{self.instantiation}"


def _template_argument(value: object) -> tuple[str, str]:
    """(text, kind of the template parameter)."""
    if isinstance(value, bool):
        return ("1" if value else "0"), "bool"
    if isinstance(value, int):
        return str(value), "int"
    return METAL_TYPES[dtype_name(value)], "typename"


def signature(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    inputs: Sequence[ArrayType],
    output_dtypes: Sequence[str],
    template: Sequence[tuple[str, object]] = (),
    atomic_outputs: bool = False,
) -> Signature:
    """MLX's generated text, and what it says in structured form."""
    arguments = [(n, *_template_argument(value)) for n, value in template]
    template_list = f"<{', '.join(text for _, text, _ in arguments)}>" if template else ""
    kernel = f"custom_kernel_{name}"
    if template:
        kernel += "_" + re.sub(r"[<>-]", "_", template_list.replace(", ", "_"))[:-1]
    for array in inputs:
        kernel += "_" + METAL_TYPES[array.dtype] + ("s" if array.ndim == 0 else "c" if array.constant else "")
    kernel += "".join("_" + METAL_TYPES[dtype] for dtype in output_dtypes)

    buffers: list[BufferParameter] = []
    lines: list[str] = []

    def buffer(declaration: str, parameter: BufferParameter) -> None:
        lines.append(f"  {declaration} {parameter.name} [[buffer({len(buffers)})]]")
        buffers.append(parameter)

    for input_name, array in zip(input_names, inputs, strict=True):
        space = "constant" if array.constant else "device"
        scalar = array.ndim == 0
        buffer(
            f"const {space} {METAL_TYPES[array.dtype]}{'&' if scalar else '*'}",
            BufferParameter(input_name, space, scalar, False, input_name, "data"),
        )
        for part, declaration in METADATA.items():
            if not scalar and f"{input_name}_{part}" in source:
                parameter = BufferParameter(
                    f"{input_name}_{part}", "constant", part == "ndim", False, input_name, part
                )
                buffer(declaration, parameter)
    for output_name, dtype in zip(output_names, output_dtypes, strict=True):
        kind = f"atomic<{METAL_TYPES[dtype]}>" if atomic_outputs else METAL_TYPES[dtype]
        buffer(f"device {kind}*", BufferParameter(output_name, "device", False, True, output_name, "data"))
    attributes = tuple(attribute for attribute in ATTRIBUTES if attribute in source)
    lines += [f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" for attribute in attributes]

    declaration = instantiation = ""
    if template:
        declaration = f"template <{', '.join(f'{kind} {n}' for n, _, kind in arguments)}>\n"
        instantiation = (
            f'\ntemplate [[host_name("{kernel}")]] [[kernel]] decltype({kernel}{template_list}) '
            f"{kernel}{template_list};\n"
        )
    declaration += f"[[kernel]] void {kernel}(\n" + ",\n".join(lines) + ") {\n"
    return Signature(header, declaration, source, instantiation, kernel + template_list, tuple(buffers), attributes)
