"""One checked bench for all kernel tests; on a Mac there is none, and the kernels run on the GPU itself."""

import sys
from collections.abc import Iterator

import mlx.core as mx
import pytest
from bench import Bench
from quick_compile import quick_to_compile

from mlxbatch.execution.attention.metal_source import KernelFactory, mlx_kernel_factory


@pytest.fixture(scope="session")
def shared_bench() -> Iterator[Bench]:
    if sys.platform == "darwin":
        pytest.skip("the CPU bench for Metal kernels runs on Linux only; on a Mac they run on the GPU itself")
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def bench(shared_bench: Bench) -> Iterator[Bench]:
    """The shared bench with its options as they were before the test."""
    options = shared_bench.options
    yield shared_bench
    shared_bench.options = options


@pytest.fixture
def kernel_factory(request: pytest.FixtureRequest) -> KernelFactory:
    """What runs kernels here: the checked bench, or on a Mac the GPU."""
    if sys.platform != "darwin":
        return quick_to_compile(request.getfixturevalue("bench").metal_kernel)
    if not mx.metal.is_available():
        pytest.skip("this Mac has no GPU that MLX can use")
    return mlx_kernel_factory()
