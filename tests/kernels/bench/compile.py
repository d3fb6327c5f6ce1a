"""Compiles kernels to shared libraries, cached on disk by the content that goes into them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .errors import SourceRejected
from .rewrite import rewrite
from .signature import ATTRIBUTES, Signature
from .toolchain import Toolchain
from .vectors import vector_header

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"
# The frames of the bench itself are left out of reports.
TRAMPOLINE = "<launch>"
# All of Metal's library is in shim/metal_stdlib; these are the names it is included by.
LIBRARY_HEADERS = (
    "metal_array metal_atomic metal_common metal_compute metal_config metal_geometric metal_integer metal_limits "
    "metal_logging metal_math metal_matrix metal_numeric metal_pack metal_relational metal_simdgroup "
    "metal_simdgroup_matrix metal_type_traits metal_uniform simd/simd.h"
)
MOST_FILES = 4000  # about 60 KB each
# What MLX puts before every custom kernel.
PRELUDE = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'
MLX_COMPLEX = "mlx/backend/metal/kernels/complex.h"

LANGUAGE = (
    "-x clcpp -cl-std=clc++2021 -cl-no-stdinc -fdeclspec -fPIC "
    "-Xclang -cl-ext=-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_device_enqueue,"
    "-__opencl_c_program_scope_global_variables "
    "-Wno-unknown-attributes -Wno-ignored-attributes -fno-color-diagnostics "
    "-O1 -ffp-contract=off -fno-math-errno -fno-builtin -fno-omit-frame-pointer "
    # Else a vector load whose components are all used becomes one load of each, and is counted so.
    "-mllvm -disable-vector-combine"
)
# The key knows the headers' content: a new checkout must not make them look changed.
PRECOMPILE = "-Xclang -emit-pch -Xclang -fno-pch-timestamp -c"
DEBUG = "-gline-tables-only -gdwarf-4"
CHECKS = (
    "-fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-read-before-write=1 "
    "-ftrivial-auto-var-init=pattern "
    "-fsanitize=signed-integer-overflow,integer-divide-by-zero,bounds,float-cast-overflow,bool,"
    "return,unreachable"
)
RUNTIME = "-c -x c++ -std=c++17 -fno-exceptions -fno-rtti -fno-stack-protector -fno-omit-frame-pointer -O2 -fPIC"


def _run(command: Sequence[str], **environment: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if result.returncode:
        raise SourceRejected(result.stderr.strip() or f"{command[0]} failed with status {result.returncode}")
    return result.stdout


def _half_conversion() -> list[str]:
    """x86-64 converts half in hardware when told so; every CPU of the last decade can."""
    if platform.machine() != "x86_64":
        return []
    return ["-mf16c"] if " f16c " in Path("/proc/cpuinfo").read_text() else []


class Compiler:
    """One cache folder and one toolchain. Safe to use from several threads and processes."""

    def __init__(self, toolchain: Toolchain, cache: Path):
        self.toolchain = toolchain
        self.cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        mlx = importlib.util.find_spec("mlx")
        if mlx is None or not mlx.submodule_search_locations:
            raise SourceRejected("the bench needs MLX's own Metal headers, and mlx is not installed")
        self._mlx = Path(next(iter(mlx.submodule_search_locations))) / "include"
        shim = "".join(path.read_text() for path in sorted(SHIM.iterdir()))
        self._generated = vector_header()
        self._content = "\0".join(
            [shim, self._generated, (HERE / "rewrite.py").read_text(), PRELUDE, importlib.metadata.version("mlx"),
             str(self._mlx), toolchain.version]
        )  # fmt: skip
        self._lock = threading.Lock()
        self._prune()
        self._language = [*LANGUAGE.split(), *_half_conversion()]

    def _prune(self) -> None:
        """Keeps the cache from growing for ever: beyond MOST_FILES, files older than a day go, oldest first."""
        files = list(self.cache.glob("kernel-*.so"))
        if len(files) <= MOST_FILES:
            return
        with contextlib.suppress(FileNotFoundError):  # another process prunes too
            files.sort(key=lambda path: path.stat().st_mtime)
            for path in files[:-MOST_FILES]:
                if path.stat().st_mtime < time.time() - 86400:
                    path.unlink()

    def runtime(self) -> Path:
        """The shared library that runs kernels (runtime/launch.cpp)."""
        sources = "".join(path.read_text() for path in sorted((HERE / "runtime").iterdir()))
        target = self.cache / f"runtime-{self._key(sources, RUNTIME)}.so"
        with self._lock:
            if not target.exists():
                made = target.with_suffix(f".{os.getpid()}.o")
                zig = str(self.cache / "zig")
                _run(
                    [*self.toolchain.cxx, *RUNTIME.split(), str(HERE / "runtime" / "launch.cpp"), "-o", str(made)],
                    ZIG_GLOBAL_CACHE_DIR=zig,
                    ZIG_LOCAL_CACHE_DIR=zig,
                )
                self._link(made, target)
        return target

    def _headers(self) -> Path:
        """Generated headers, and MLX's complex.h with constructors that clang accepts."""
        folder = self.cache / f"headers-{self._key()}"
        if not folder.exists():
            making = folder.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
            (making / "simd").mkdir(parents=True)
            for name in LIBRARY_HEADERS.split():
                (making / name).write_text('#include "metal_stdlib"\n')
            (making / "generated_vectors.h").write_text(self._generated)
            (making / MLX_COMPLEX).parent.mkdir(parents=True)
            (making / MLX_COMPLEX).write_text(rewrite((self._mlx / MLX_COMPLEX).read_text()))
            try:
                making.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
        return folder

    def _precompiled(self, flags: list[str]) -> Path:
        target = self.cache / f"prelude-{self._key(PRECOMPILE, *flags)}.pch"
        with self._lock:
            if not target.exists():
                source = target.with_suffix(f".{os.getpid()}.h")
                source.write_text(PRELUDE)
                made = target.with_suffix(f".{os.getpid()}.tmp")
                _run([*self.toolchain.clang, *flags, *PRECOMPILE.split(), str(source), "-o", str(made)])
                made.rename(target)
        return target

    def _flags(self, checked: bool, debug: bool) -> list[str]:
        includes = [f"-I{path}" for path in (SHIM, self._headers(), self._mlx)]
        return [*self._language, *includes, *(CHECKS.split() if checked else ()), *(DEBUG.split() if debug else ())]

    def library(self, name: str, signature: Signature, checked: bool, debug: bool) -> Path:
        """Where the shared library of a kernel is, or will be."""
        lint = (HERE / "lint.py").read_text() if checked else ""
        return self.cache / f"kernel-{self._key(translate(name, signature), lint, *self._flags(checked, debug))}.so"

    def build(self, name: str, signature: Signature, checked: bool, debug: bool) -> Path:
        """Compiles a kernel. Raises SourceRejected with clang's words about the Metal source."""
        flags = self._flags(checked, debug)
        text = translate(name, signature)
        target = self.library(name, signature, checked, debug)
        source = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}.cl")
        source.write_text(text)
        made = source.with_suffix(".o")
        prelude = str(self._precompiled(flags))
        try:
            _run([*self.toolchain.clang, *flags, "-include-pch", prelude, "-c", str(source), "-o", str(made)])
            self._link(made, target)
        finally:
            source.unlink()
        return target

    def syntax_tree(self, name: str, signature: Signature) -> str:
        """clang's dump of the kernel's declarations, for lint.py."""
        flags = self._flags(checked=True, debug=False)
        source = self.cache / f"tree.{os.getpid()}.{threading.get_ident()}.cl"
        source.write_text(translate(name, signature))
        prelude = str(self._precompiled(flags))
        try:
            return _run(
                [*self.toolchain.clang, *flags, "-include-pch", prelude, "-fsyntax-only", "-Xclang", "-ast-dump",
                 str(source)]
            )  # fmt: skip
        finally:
            source.unlink()

    def _link(self, made: Path, target: Path) -> None:
        library = made.with_suffix(".so.tmp")
        _run([*self.toolchain.link, str(made), "-o", str(library)])
        library.rename(target)
        made.unlink()

    def _key(self, *parts: str) -> str:
        return hashlib.sha256("\0".join([self._content, *parts]).encode()).hexdigest()[:20]


def translate(name: str, signature: Signature) -> str:
    """The kernel as C++ for OpenCL, with the function that the runtime calls. Lines are those of the header and of
    the body, unless these have #line directives of their own."""
    # Only the bench's own text carries names of files: quotes would end them.
    name = re.sub(r'["\\]', "_", name)
    arguments = [
        f"bench::{'reference' if buffer.reference else 'pointer'}_argument{{args[{i}]}}"
        for i, buffer in enumerate(signature.buffers)
    ]
    numbers = {attribute: i for i, attribute in enumerate(ATTRIBUTES)}
    arguments += [
        f"bench::attribute{3 if ATTRIBUTES[attribute] == 'uint3' else 1}({numbers[attribute]})"
        for attribute in signature.attributes
    ]
    return (
        f'#line 1 "{name} (header)"\n{rewrite(signature.header)}\n'
        f'#line 1 "{name} (signature)"\n{rewrite(signature.declaration)}'
        f'#line 1 "{name}"\n{rewrite(signature.source)}\n}}\n'
        f'#line 1 "{TRAMPOLINE}"\n'
        'extern "C" __attribute__((no_sanitize("thread", "undefined")))\n'
        f"void bench_entry(const __private ulong* args) {{ {signature.call}({', '.join(arguments)}); }}\n"
    )
