"""Kernels with one bug each, on the line that ends with MARK; some with a correction that must be clean.

All run as two threadgroups of 128 threads on 256 zeros `x`, and write 256 floats `out`.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench import Kind

MARK = "// <- here"
# Helpers, so that bugs are found through calls as well.
HEADER = """#line 1 "planted.metal"
inline float load(const device float* p, int i) { return p[i]; }
inline float last(thread const float* p, int n) { return p[n - 1]; }
inline int sign_of(float x) { if (x > 0) { return 1; } if (x < -1e30f) { return -1; } }
"""
PREFIX = """
#line 11 "planted.metal"
  const uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, i = thread_position_in_grid.x;
  const uint simd = simdgroup_index_in_threadgroup, group = threadgroup_position_in_grid.x;
"""
FIRST_LINE = 13  # of the sources below


@dataclass(frozen=True)
class Planted:
    kind: Kind
    source: str
    corrected: str = ""

    @property
    def line(self) -> int:
        lines = self.source.splitlines()
        return FIRST_LINE + next(n for n, line in enumerate(lines) if line.endswith(MARK))


def _replaced(kind: Kind, corrected: str, good: str, bad: str) -> Planted:
    """A kernel that is right with `good` in it."""
    assert good in corrected
    return Planted(kind, corrected.replace(good, bad), corrected)


_TWO_PHASES = """
  threadgroup float s[128];
  s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float y = s[127 - t];
  threadgroup_barrier(mem_flags::mem_threadgroup);  // between
  s[t] = y; // <- here
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t];
"""
_BETWEEN = "threadgroup_barrier(mem_flags::mem_threadgroup);  // between"
_THROUGH_OUTPUT = """
  out[i] = x[i];
  threadgroup_barrier(mem_flags::mem_device);  // first
  float y = out[group * 128 + 127 - t]; // <- here
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = y;
"""
_WITHIN_SIMDGROUP = """
  threadgroup float s[128];
  s[t] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t ^ 1]; // <- here
"""

PLANTED = {
    "missing barrier": _replaced(Kind.THREADGROUP_RACE, _TWO_PHASES, _BETWEEN, ""),
    "barrier that orders nothing": _replaced(
        Kind.THREADGROUP_RACE, _TWO_PHASES, _BETWEEN, "threadgroup_barrier(mem_flags::mem_none);"
    ),
    "simdgroup barrier across simdgroups": _replaced(
        Kind.THREADGROUP_RACE, _TWO_PHASES, _BETWEEN, "simdgroup_barrier(mem_flags::mem_threadgroup);"
    ),
    "lock step within a simdgroup": _replaced(
        Kind.THREADGROUP_RACE, _WITHIN_SIMDGROUP, "simdgroup_barrier(mem_flags::mem_threadgroup);", ""
    ),
    "collective taken for a barrier": _replaced(
        Kind.THREADGROUP_RACE, _WITHIN_SIMDGROUP, "simdgroup_barrier(mem_flags::mem_threadgroup)", "simd_sum(x[i])"
    ),
    "every thread writes": _replaced(
        Kind.THREADGROUP_RACE,
        """
  threadgroup float s[1];
  if (t == 0) s[0] = x[i]; // <- here
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[0];
""",
        "if (t == 0) ",
        "",
    ),
    "two threadgroups write one output": Planted(
        Kind.DEVICE_RACE,
        """
  out[t] = x[i]; // <- here
  out[255 - t] = 0;
""",
    ),
    "output exchanged without mem_device": _replaced(
        Kind.DEVICE_RACE, _THROUGH_OUTPUT, "mem_device);  // first", "mem_threadgroup);"
    ),
    "threads return before a barrier": _replaced(
        Kind.DIVERGENT_BARRIER,
        """
  out[i] = x[i];
  if (t == 999) return;
  threadgroup_barrier(mem_flags::mem_threadgroup); // <- here
""",
        "999",
        "127",
    ),
    "barrier in a divergent loop": Planted(
        Kind.DIVERGENT_BARRIER,
        """
  for (uint n = 0; n < simd; n++) {
    threadgroup_barrier(mem_flags::mem_threadgroup); // <- here
  }
  out[i] = x[i];
""",
    ),
    "collective in a divergent branch": Planted(
        Kind.DIVERGENT_COLLECTIVE,
        """
  float y = x[i];
  if (lane < 16) {
    y = simd_sum(y); // <- here
  } else {
    y = simd_max(y);
  }
  out[i] = y;
""",
        """
  float y = x[i];
  if (lane < 16) {
    y = simd_sum(y);
  }
  out[i] = y;
""",
    ),
    "collective in a loop of its own length per lane": _replaced(
        Kind.DIVERGENT_COLLECTIVE,
        """
  float y = 0;
  for (uint n = 0; n < simd; n++) {
    y += simd_sum(1.0f); // <- here
  }
  out[i] = simd_sum(y);
""",
        "n < simd",
        "n < lane",
    ),
    "simdgroup barrier in a divergent branch": Planted(
        Kind.DIVERGENT_COLLECTIVE,
        """
  if (lane < 16) {
    simdgroup_barrier(mem_flags::mem_threadgroup); // <- here
  }
  out[i] = simd_sum(x[i]);
""",
    ),
    "shuffle from an inactive lane": _replaced(
        Kind.INACTIVE_LANE,
        """
  float y = x[i];
  if (lane < 8) {
    y = simd_shuffle(y, 7); // <- here
  }
  out[i] = y;
""",
        "7)",
        "9)",
    ),
    "read behind an input": _replaced(
        Kind.DEVICE_BOUNDS, "\n  out[i] = load(x, i); // <- here\n", "load(x, i)", "load(x, i + 1)"
    ),
    "read before an input": Planted(Kind.DEVICE_BOUNDS, "\n  out[i] = x[int(i) - 1]; // <- here\n"),
    "read far behind an input": Planted(Kind.DEVICE_BOUNDS, "\n  out[i] = x[i + 20000]; // <- here\n"),
    "write behind an output": Planted(Kind.DEVICE_BOUNDS, "\n  out[i] = x[i];\n  out[i + 1] = 0; // <- here\n"),
    "wild pointer": Planted(Kind.WILD_POINTER, "\n  out[i] = *(const device float*)(1234567890123ul); // <- here\n"),
    "threadgroup pointer too far": _replaced(
        Kind.THREADGROUP_BOUNDS,
        """
  threadgroup float s[128];
  threadgroup float* p = s + t;
  p[0] = 0; // <- here
  out[i] = x[i];
""",
        "p[0]",
        "p[1]",
    ),
    "array index too large": _replaced(
        Kind.ARRAY_BOUNDS,
        """
  float a[4] = {1, 2, 3, 4};
  out[i] = a[lane % 4]; // <- here
""",
        "% 4",
        "% 5",
    ),
    "pointer behind a private array": _replaced(
        Kind.ARRAY_BOUNDS,
        """
  float a[4] = {1, 2, 3, x[i]};
  out[i] = last(a, 4); // <- here
""",
        "4);",
        "5 + int(t % 2));",
    ),
    "misaligned vector": _replaced(
        Kind.MISALIGNED,
        """
  float4 v = *(const device float4*)(x + i % 8 * 4); // <- here
  out[i] = v.x;
""",
        "i % 8 * 4",
        "i % 8",
    ),
    "misaligned vector in threadgroup memory": _replaced(
        Kind.MISALIGNED,
        """
  threadgroup half s[256];
  s[2 * t] = s[2 * t + 1] = half(t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  half2 v = *(threadgroup half2*)(s + 2 * t); // <- here
  out[i] = v.x;
""",
        "s + 2 * t)",
        "s + t)",
    ),
    "misaligned scalar": Planted(
        Kind.MISALIGNED, "\n  out[i] = *(const device float*)((const device char*)x + 2); // <- here\n"
    ),
    "threadgroup memory not initialised": _replaced(
        Kind.UNINITIALISED_THREADGROUP,
        """
  threadgroup float s[128];
  if (t < 128) s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t]; // <- here
""",
        "t < 128",
        "t < 100",
    ),
    "output read before it is written": Planted(
        Kind.UNINITIALISED_OUTPUT,
        """
  float y = out[i]; // <- here
  out[i] = x[i] + 0 * y;
""",
    ),
    "too much threadgroup memory": _replaced(
        Kind.THREADGROUP_MEMORY,
        """
  threadgroup float a[8000];
  threadgroup float b[192]; // <- here
  a[t] = b[t] = x[i];
  out[i] = a[t] + b[t];
""",
        "192",
        "193",
    ),
    "too many threadgroup variables": Planted(
        Kind.THREADGROUP_MEMORY,
        f"""
  threadgroup float {", ".join(f"s{n}[1]" for n in range(31))};
  threadgroup float last[128]; // <- here
  last[t] = x[i];
  out[i] = last[t];
""",
    ),
    "write to an input behind a cast": Planted(
        Kind.READ_ONLY_WRITE,
        """
  ((device float*)x)[i] = 1; // <- here
  out[i] = 0;
""",
    ),
    "another thread's private memory": Planted(
        Kind.PRIVATE_ACCESS,
        """
  threadgroup ulong where[1];
  volatile float mine = x[i];
  if (t == 0) where[0] = ulong(&mine);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = *(volatile thread float*)where[0]; // <- here
""",
    ),
    "integer overflow": _replaced(
        Kind.INTEGER_OVERFLOW,
        """
  int large = 2147483520;
  out[i] = large + int(t); // <- here
""",
        "2147483520",
        "2147483521",
    ),
    "division by zero": _replaced(
        Kind.DIVISION, "\n  out[i] = 7 / int(x[i] + 1); // <- here\n", "int(x[i] + 1)", "int(x[i])"
    ),
    "float too large for int": _replaced(
        Kind.FLOAT_CONVERSION, "\n  out[i] = int(x[i] + 1e9f); // <- here\n", "1e9f", "1e10f"
    ),
}

# These end the process that kernels run in.
CRASHES = {
    "endless loop": Planted(
        Kind.TIMEOUT,
        """
  volatile int n = 0;
  while (x[0] == 0) n = n + 1; // <- here
  out[i] = n;
""",
    ),
    "null pointer": Planted(
        Kind.WILD_POINTER,
        """
  volatile float y = x[i];
  y = *(const device float*)(8ul + ulong(y)); // <- here
  out[i] = y;
""",
    ),
    "stack overflow": Planted(
        Kind.STACK_OVERFLOW,
        """
  volatile float large[100000];
  large[lane] = x[i]; // <- here
  out[i] = large[lane];
""",
    ),
}
