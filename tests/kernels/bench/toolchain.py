"""Finds the compilers: a system clang 16 or newer, else the one inside PyPI's `ziglang`."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import Unavailable

LEAST_CLANG = 16


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Commands to which source and output files are appended."""

    clang: tuple[str, ...]  # C++ for OpenCL to an object file
    link: tuple[str, ...]  # an object file to a shared library; symbols may stay undefined
    cxx: tuple[str, ...]  # C++ with the C library's headers to an object file
    version: str


def system_clang() -> Toolchain | None:
    """The newest clang on PATH that is new enough and can build a shared library."""
    best: tuple[int, str, str] | None = None
    for name in ("clang", *(f"clang-{n}" for n in range(40, LEAST_CLANG - 1, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        match = re.search(r"clang version (\d+)", version)
        if match and int(match.group(1)) >= LEAST_CLANG and (best is None or int(match.group(1)) > best[0]):
            best = (int(match.group(1)), path, version.splitlines()[0])
    if best is None:
        return None
    _, clang, version = best
    probe = subprocess.run(
        [clang, "-x", "c++", "-shared", "-nostdlib", "-", "-o", "/dev/null"],
        input="#include <sys/mman.h>\n#include <string.h>\nint bench_probe;",
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        return None
    return Toolchain((clang,), (clang, "-shared", "-nostdlib"), (clang,), version)


def zig_clang() -> Toolchain | None:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    zig = str(Path(next(iter(spec.submodule_search_locations))) / "zig")
    version = subprocess.run([zig, "clang", "--version"], capture_output=True, text=True).stdout
    target = f"{platform.machine()}-linux-gnu"
    return Toolchain(
        (zig, "clang"),
        (zig, "ld.lld", "-shared"),
        (zig, "cc", "-target", target, "-fno-sanitize=all"),
        "zig " + version.splitlines()[0],
    )


def find_toolchain() -> Toolchain:
    """Raises Unavailable, with the reason, where the bench cannot run."""
    if sys.platform != "linux":
        raise Unavailable("the CPU bench for Metal kernels runs on Linux only; on a Mac they run on the GPU itself")
    if platform.machine() not in ("x86_64", "aarch64"):
        raise Unavailable(f"the CPU bench for Metal kernels does not know {platform.machine()}")
    found = system_clang() or zig_clang()
    if found is None:
        raise Unavailable(
            f"the CPU bench for Metal kernels needs clang {LEAST_CLANG} or newer, or the PyPI package ziglang"
        )
    return found
