"""Which BLAS MLX uses on a CPU, and on how many threads. Call `prepare_backend()` before importing `mlx.core`."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterator

from mlxbatch.errors import UsageError

logger = logging.getLogger(__name__)

BLAS_VARIABLE = "MLXBATCH_BLAS"
_SYSTEM_OPENBLAS = ("libopenblas.so.0", "libopenblas.so")
_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@functools.cache
def prepare_backend() -> str | None:
    """Load a fast BLAS for MLX on Linux and return its path or name; None if there is none, or on macOS.

    The `mlx-cpu` wheel carries the reference BLAS, which multiplies float32 matrices 7 to 25 times slower
    than a tuned one. A library loaded with RTLD_GLOBAL before `mlx.core` resolves the same symbols first.
    Tried in order: the library named by $MLXBATCH_BLAS, the system's OpenBLAS, the `mkl` package. Without
    any of them, or when MLX is loaded already, a warning says so and MLX works at its own speed.

    Raises UsageError when $MLXBATCH_BLAS names a library that cannot be loaded.
    """
    if not sys.platform.startswith("linux"):
        return None
    if "mlx.core" in sys.modules:
        logger.warning("mlx.core was imported before a fast BLAS could be loaded: expect slow products")
        return None
    _leave_a_core_free()
    chosen = os.environ.get(BLAS_VARIABLE)
    if chosen:
        try:
            ctypes.CDLL(chosen, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise UsageError(
                f"{BLAS_VARIABLE} names {chosen!r}, which cannot be loaded: {error}. Unset it or name a BLAS "
                "with the cblas interface, such as libopenblas.so.0"
            ) from None
        return chosen
    for candidate in (*_SYSTEM_OPENBLAS, *_mkl_libraries()):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return candidate
    logger.warning(
        "no fast BLAS found, so MLX multiplies matrices with its slow built-in one; install libopenblas0 "
        "(apt), or `pip install mkl` on x86-64, or point %s at a library",
        BLAS_VARIABLE,
    )
    return None


def _leave_a_core_free() -> None:
    """As many BLAS threads as cores but one, and none that spins, unless the user's environment says otherwise.

    Python and MLX keep a core busy between products. BLAS threads wait for each other by spinning: with one on
    every core, each product waits for the one that lost its core (2 cores, another process busy: 6 times slower).
    """
    if not any(variable in os.environ for variable in (*_THREAD_VARIABLES, "OMP_NUM_THREADS")):
        threads = str(max(1, len(os.sched_getaffinity(0)) - 1))
        os.environ.update(dict.fromkeys(_THREAD_VARIABLES, threads))
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def _mkl_libraries() -> Iterator[str]:
    """The single dynamic library of the `mkl` package, wherever pip put it."""
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name.startswith("libmkl_rt.so"):
            yield os.path.realpath(file.locate())
