"""What is compiled once is not compiled again, and the bench says why where it cannot run."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from bench import Bench, BenchError, Options, Unavailable
from bench.compile import SHIM
from bench.toolchain import find_toolchain

CALL: dict[str, Any] = {
    "inputs": [mx.ones(8)],
    "grid": (8, 1, 1),
    "threadgroup": (8, 1, 1),
    "output_shapes": [(8,)],
    "output_dtypes": [mx.float32],
}


def libraries(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("kernel-*.so")}


def ones_times(bench: Bench, factor: int) -> float:
    kernel = bench.metal_kernel(
        "times", ["x"], ["out"], f"uint i = thread_position_in_grid.x; out[i] = {factor} * x[i];"
    )
    (out,) = kernel(**CALL)
    return out.sum().item()


@pytest.fixture(scope="module")
def cache(shared_bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def test_a_second_bench_compiles_nothing(cache: Path) -> None:
    first = Bench(Options(checked=False), cache=cache)
    before = libraries(cache)
    assert ones_times(first, 2) == 16
    compiled = libraries(cache)
    assert len(compiled) == len(before) + 1
    second = Bench(Options(checked=False), cache=cache)
    assert ones_times(second, 2) == 16
    assert libraries(cache) == compiled
    assert ones_times(second, 3) == 24
    assert len(libraries(cache)) == len(compiled) + 1
    first.close()
    second.close()


def test_a_fresh_checkout_uses_the_cache(cache: Path) -> None:
    """The same content with new times, as git leaves it."""
    bench = Bench(Options(checked=False), cache=cache)
    assert ones_times(bench, 4) == 32
    for path in SHIM.iterdir():
        os.utime(path)
    assert ones_times(bench, 5) == 40
    bench.close()


def test_the_cache_is_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old files go, oldest first; those of today stay, as another process may be about to use them."""
    monkeypatch.setattr("bench.compile.MOST_FILES", len(libraries(cache)) + 1)
    for days, name in ((3, "kernel-old.so"), (2, "kernel-newer.so"), (0, "kernel-new.so")):
        (cache / name).touch()
        os.utime(cache / name, (time.time() - days * 86400 - 60,) * 2)
    Bench(cache=cache)
    left = libraries(cache)
    assert "kernel-old.so" not in left and "kernel-newer.so" not in left and "kernel-new.so" in left


def test_variants_compile_together(cache: Path) -> None:
    bench = Bench(Options(checked=False), cache=cache)
    kernel = bench.metal_kernel("variant", ["x"], ["out"], "out[thread_position_in_grid.x] = N * x[0];")
    calls = [{**CALL, "template": [("N", n)]} for n in range(4)]
    before = libraries(cache)
    bench.compile_all((kernel, call) for call in calls)
    compiled = libraries(cache)
    assert len(compiled) == len(before) + 4
    assert [kernel(**call)[0][0].item() for call in calls] == [0, 1, 2, 3]
    assert libraries(cache) == compiled
    bench.close()


def test_any_thread_may_launch(bench: Bench) -> None:
    results: list[float] = []
    threads = [threading.Thread(target=lambda n=n: results.append(ones_times(bench, n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0, 8, 16, 24]


def test_options_that_contradict(bench: Bench) -> None:
    with pytest.raises(BenchError, match="count=True needs checked=True"):
        bench.configure(checked=False, count=True)


@pytest.mark.parametrize(
    ("platform", "reason"), [("darwin", "on a Mac they run on the GPU itself"), ("win32", "on Linux only")]
)
def test_other_systems_are_told(monkeypatch: pytest.MonkeyPatch, platform: str, reason: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(Unavailable, match=reason):
        find_toolchain()


def test_a_machine_without_compilers_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.toolchain.system_clang", lambda: None)
    monkeypatch.setattr("bench.toolchain.zig_clang", lambda: None)
    with pytest.raises(Unavailable, match="clang 16 or newer, or the PyPI package ziglang"):
        find_toolchain()
