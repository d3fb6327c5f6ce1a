"""Reads a kernel from metal_kernels/ in the two parts that `mx.fast.metal_kernel` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Protocol, cast

import mlx.core as mx

from mlxbatch.errors import EngineError

BODY_MARK = "//@body\n"
SHARED_FILES = ("fragments.metal", "softmax.metal", "paged_kv.metal")


class Kernel(Protocol):
    """What `mx.fast.metal_kernel` returns."""

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
    ) -> list[Any]: ...


class KernelFactory(Protocol):
    """The part of `mx.fast.metal_kernel`'s signature that is used here, so that tests can pass a stand-in."""

    def __call__(
        self, *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str
    ) -> Kernel: ...


def mlx_kernel_factory() -> KernelFactory:
    return cast(KernelFactory, mx.fast.metal_kernel)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """`header` goes before the generated signature, `body` inside it. Compilers report lines of the files."""

    name: str
    header: str
    body: str


@cache
def load_kernel_source(name: str) -> KernelSource:
    """Reads metal_kernels/<name>.metal; everything above the line `//@body` is its header."""
    folder = files("mlxbatch.metal_kernels")
    shared = "".join(
        f'#line 1 "{file}"\n{folder.joinpath(file).read_text(encoding="utf-8")}' for file in SHARED_FILES
    )
    text = folder.joinpath(f"{name}.metal").read_text(encoding="utf-8")
    header, mark, body = text.partition(BODY_MARK)
    if not mark:
        raise EngineError(
            f"metal_kernels/{name}.metal has no line {BODY_MARK.strip()!r}: the installation is damaged"
        )
    body_line = header.count("\n") + 2
    return KernelSource(
        name=name,
        header=f'{shared}#line 1 "{name}.metal"\n{header}',
        body=f'\n#line {body_line} "{name}.metal"\n{body}',
    )
