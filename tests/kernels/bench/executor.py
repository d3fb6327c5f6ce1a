"""The process that kernels run in: a crash or an endless loop ends it, not the tests.

Started by worker.py as a plain script, so it imports nothing but the standard library. Each line on stdin is
"<arena size> <timeout in seconds> <shared library>"; the launch itself is described at the arena's start, its report
is written behind that, and a byte on stdout says that it is there.
"""

import contextlib
import ctypes
import mmap
import os
import sys

LAUNCH_OFFSET, REPORT_OFFSET = 0, 4096


def main() -> None:
    runtime_path, arena_fd = sys.argv[1], int(sys.argv[2])
    # Kernels call the functions of the maths library and of the runtime by name.
    with contextlib.suppress(OSError):  # musl has them in libc
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    runtime = ctypes.CDLL(runtime_path, mode=ctypes.RTLD_GLOBAL)
    alarm = ctypes.CDLL(None).alarm
    launch = runtime.bench_launch
    launch.argtypes = [ctypes.c_void_p] * 4
    launch.restype = None
    entries: dict[str, int | None] = {}
    arena, base = None, 0
    for line in sys.stdin:
        size, timeout, library = line.rstrip("\n").split(" ", 2)
        if arena is None or len(arena) != int(size):
            arena = mmap.mmap(arena_fd, int(size))
            base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        if library not in entries:
            entries[library] = ctypes.cast(ctypes.CDLL(library).bench_entry, ctypes.c_void_p).value
        alarm(int(timeout))
        launch(entries[library], base, base + LAUNCH_OFFSET, base + REPORT_OFFSET)
        alarm(0)
        os.write(1, b".")


if __name__ == "__main__":
    main()
