"""Planted bugs: every check fires, with the file and line of the bug, and does not fire on the corrected kernel."""

from dataclasses import dataclass

import mlx.core as mx
import pytest
from bench import Bench, BenchError, KernelFault, Kind

MARK = "// <- here"
THREADS = 128  # in each of two threadgroups
# A helper takes part, so that places are found through calls as well.
HEADER = """#line 1 "planted.metal"
inline float load(const device float* p, int i) { return p[i]; }
inline int sign_of(float x) { if (x > 0) { return 1; } if (x < -1e30f) { return -1; } }
"""
PREFIX = """
#line 11 "planted.metal"
  const uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup, i = thread_position_in_grid.x;
  const uint simd = simdgroup_index_in_threadgroup, group = threadgroup_position_in_grid.x;
"""


@dataclass(frozen=True)
class Planted:
    kind: Kind
    source: str  # the line of the bug ends with MARK
    corrected: str | None = None


EXCHANGE = "  threadgroup float s[128];\n  s[t] = x[i];\n{barrier}\n  out[i] = s[{partner}];"


def exchange(barrier: str, partner: str = "127 - t") -> str:
    return EXCHANGE.format(barrier=barrier, partner=partner)


TWO_BARRIERS = """
  threadgroup float s[128];
  s[t] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float y = s[127 - t];
  {barrier}
  s[t] = y;{mark}
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = s[t];"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DEVICE_EXCHANGE = """
  out[i] = x[i];
  threadgroup_barrier(mem_flags::mem_{first});
  float y = out[group * 128 + 127 - t]; {mark}
  threadgroup_barrier(mem_flags::mem_device);
  out[i] = y;"""

PLANTED = {
    "missing barrier": Planted(
        Kind.THREADGROUP_RACE,
        TWO_BARRIERS.format(barrier="", mark=MARK),
        TWO_BARRIERS.format(barrier=BARRIER, mark=""),
    ),
    "barrier that orders nothing": Planted(
        Kind.THREADGROUP_RACE, TWO_BARRIERS.format(barrier="threadgroup_barrier(mem_flags::mem_none);", mark=MARK)
    ),
    "simdgroup barrier across simdgroups": Planted(
        Kind.THREADGROUP_RACE,
        TWO_BARRIERS.format(barrier="simdgroup_barrier(mem_flags::mem_threadgroup);", mark=MARK),
    ),
    "lock step within a simdgroup": Planted(
        Kind.THREADGROUP_RACE,
        exchange("  simdgroup_barrier(mem_flags::mem_none);", "t ^ 1")
        .replace("];", f"]; {MARK}", 3)
        .replace(f"s[128]; {MARK}", "s[128];")
        .replace(f"x[i]; {MARK}", "x[i];"),
        exchange("  simdgroup_barrier(mem_flags::mem_threadgroup);", "t ^ 1"),
    ),
    "collective taken for a barrier": Planted(
        Kind.THREADGROUP_RACE,
        "  threadgroup float s[128];\n  s[t] = x[i];\n  float y = simd_sum(x[i]);\n"
        f"  out[i] = s[t ^ 1] + 0 * y; {MARK}",
    ),
    "every thread writes": Planted(
        Kind.THREADGROUP_RACE,
        f"  threadgroup float s[1];\n  s[0] = x[i]; {MARK}\n  {BARRIER}\n  out[i] = s[0];",
        f"  threadgroup float s[1];\n  if (t == 0) s[0] = x[i];\n  {BARRIER}\n  out[i] = s[0];",
    ),
    "two threadgroups write one output": Planted(
        Kind.DEVICE_RACE, f"  out[t] = x[i]; {MARK}\n  out[255 - t] = 0;", "  out[i] = x[i];"
    ),
    "output exchanged without mem_device": Planted(
        Kind.DEVICE_RACE,
        DEVICE_EXCHANGE.format(first="threadgroup", mark=MARK),
        DEVICE_EXCHANGE.format(first="device", mark=""),
    ),
    "threads return before a barrier": Planted(
        Kind.DIVERGENT_BARRIER,
        f"  out[i] = x[i];\n  if (t == 127) return;\n  {BARRIER} {MARK}",
        f"  out[i] = x[i];\n  {BARRIER}",
    ),
    "barrier in a divergent loop": Planted(
        Kind.DIVERGENT_BARRIER, f"  for (uint n = 0; n < simd; n++) {{\n    {BARRIER} {MARK}\n  }}\n  out[i] = x[i];"
    ),
    "collective in a divergent branch": Planted(
        Kind.DIVERGENT_COLLECTIVE,
        f"  float y = x[i];\n  if (lane < 16) {{\n    y = simd_sum(y); {MARK}\n  }} else {{\n    y = simd_max(y);\n  }}\n"
        "  out[i] = y;",
        "  float y = 0;\n  if (lane < 16) {\n    y = simd_sum(x[i]);\n  }\n  out[i] = y;",
    ),
    "collective in a loop of its own length per lane": Planted(
        Kind.DIVERGENT_COLLECTIVE,
        f"  float y = 0;\n  for (uint n = 0; n < lane; n++) {{\n    y += simd_sum(1.0f); {MARK}\n  }}\n"
        "  out[i] = simd_sum(y);",
        "  float y = 0;\n  for (uint n = 0; n < simd + 1; n++) {\n    y += simd_sum(1.0f);\n  }\n  out[i] = simd_sum(y);",
    ),
    "simdgroup barrier in a divergent branch": Planted(
        Kind.DIVERGENT_COLLECTIVE,
        f"  if (lane < 16) {{\n    simdgroup_barrier(mem_flags::mem_threadgroup); {MARK}\n  }}\n"
        "  out[i] = simd_sum(x[i]);",
    ),
    "shuffle from an inactive lane": Planted(
        Kind.INACTIVE_LANE,
        f"  float y = x[i];\n  if (lane < 8) {{\n    y = simd_shuffle(y, 9); {MARK}\n  }}\n  out[i] = y;",
        "  float y = x[i];\n  if (lane < 8) {\n    y = simd_shuffle(y, 7);\n  }\n  out[i] = y;",
    ),
    "read behind an input": Planted(
        Kind.DEVICE_BOUNDS, f"  out[i] = load(x, i + 1); {MARK}", "  out[i] = load(x, i);"
    ),
    "read before an input": Planted(Kind.DEVICE_BOUNDS, f"  out[i] = x[int(i) - 1]; {MARK}"),
    "read far behind an input": Planted(Kind.DEVICE_BOUNDS, f"  out[i] = x[i + 20000]; {MARK}"),
    "write behind an output": Planted(Kind.DEVICE_BOUNDS, f"  out[i] = x[i];\n  out[i + 1] = 0; {MARK}"),
    "wild pointer": Planted(Kind.WILD_POINTER, f"  out[i] = *(const device float*)(1234567890123ul); {MARK}"),
    "threadgroup pointer too far": Planted(
        Kind.THREADGROUP_BOUNDS,
        f"  threadgroup float s[128];\n  threadgroup float* p = s + t;\n  p[1] = 0; {MARK}\n  out[i] = x[i];",
    ),
    "constant index too large": Planted(
        Kind.ARRAY_BOUNDS, f"  float a[4] = {{1, 2, 3, 4}};\n  out[i] = a[lane % 5]; {MARK}"
    ),
    "misaligned vector": Planted(
        Kind.MISALIGNED,
        f"  float4 v = *(const device float4*)(x + i % 8); {MARK}\n  out[i] = v.x;",
        "  float4 v = *(const device float4*)(x + i % 8 * 4);\n  out[i] = v.x;",
    ),
    "misaligned half vector in threadgroup memory": Planted(
        Kind.MISALIGNED,
        f"  threadgroup half s[256];\n  s[2 * t] = s[2 * t + 1] = half(t);\n  {BARRIER}\n"
        f"  half2 v = *(threadgroup half2*)(s + t); {MARK}\n  out[i] = v.x;",
    ),
    "misaligned scalar": Planted(
        Kind.MISALIGNED, f"  out[i] = *(const device float*)((const device char*)x + 2); {MARK}"
    ),
    "threadgroup memory not initialised": Planted(
        Kind.UNINITIALISED_THREADGROUP,
        f"  threadgroup float s[128];\n  if (t < 100) s[t] = x[i];\n  {BARRIER}\n  out[i] = s[t]; {MARK}",
        f"  threadgroup float s[128];\n  s[t] = x[i];\n  {BARRIER}\n  out[i] = s[t];",
    ),
    "output read before it is written": Planted(
        Kind.UNINITIALISED_OUTPUT, f"  float y = out[i]; {MARK}\n  out[i] = x[i] + 0 * y;"
    ),
    "too much threadgroup memory": Planted(
        Kind.THREADGROUP_MEMORY,
        f"  threadgroup float a[8000];\n  threadgroup float b[200]; {MARK}\n  a[t] = b[t] = x[i];\n  out[i] = a[t] + b[t];",
        "  threadgroup float a[8000];\n  threadgroup float b[192];\n  a[t] = b[t] = x[i];\n  out[i] = a[t] + b[t];",
    ),
    "too many threadgroup variables": Planted(
        Kind.THREADGROUP_MEMORY,
        "  threadgroup float "
        + ", ".join(f"s{n}[1]" for n in range(31))
        + f";\n  threadgroup float last[128]; {MARK}\n  last[t] = x[i];\n  out[i] = last[t];",
    ),
    "write to an input behind a cast": Planted(
        Kind.READ_ONLY_WRITE, f"  ((device float*)x)[i] = 1; {MARK}\n  out[i] = 0;"
    ),
    "another thread's private memory": Planted(
        Kind.PRIVATE_ACCESS,
        "  threadgroup ulong where[1];\n  volatile float mine = x[i];\n  if (t == 0) where[0] = ulong(&mine);\n"
        f"  {BARRIER}\n  out[i] = *(volatile thread float*)where[0]; {MARK}",
    ),
    "integer overflow": Planted(
        Kind.INTEGER_OVERFLOW, f"  int big = 2147483647;\n  out[i] = big + int(t); {MARK}", "  out[i] = 1 + int(t);"
    ),
    "division by zero": Planted(Kind.DIVISION, f"  out[i] = 7 / int(x[i]); {MARK}"),
    "float too large for int": Planted(Kind.FLOAT_CONVERSION, f"  out[i] = int(x[i] + 1e20f); {MARK}"),
}


def launch(bench: Bench, source: str, **options: object) -> mx.array:
    kernel = bench.metal_kernel("planted", ["x"], ["out"], PREFIX + source, HEADER)
    (out,) = kernel(
        inputs=[mx.zeros(2 * THREADS)], grid=(2 * THREADS, 1, 1), threadgroup=(THREADS, 1, 1),
        output_shapes=[(2 * THREADS,)], output_dtypes=[mx.float32],
    )  # fmt: skip
    return out


def marked_line(source: str) -> int:
    return next(n for n, line in enumerate((PREFIX + source).splitlines(), 9) if line.endswith(MARK))


@pytest.mark.parametrize("name", PLANTED)
def test_check_fires_at_its_line(bench: Bench, name: str) -> None:
    planted = PLANTED[name]
    with pytest.raises(KernelFault) as caught:
        launch(bench, planted.source)
    found = [f for f in caught.value.report.findings if f.kind is planted.kind]
    assert found, str(caught.value)
    places = {place for f in found for place in (f.location, *f.callers) if place}
    assert ("planted.metal", marked_line(planted.source)) in {(p.file, p.line) for p in places}


@pytest.mark.parametrize("name", [name for name, planted in PLANTED.items() if planted.corrected])
def test_corrected_kernel_has_no_findings(bench: Bench, name: str) -> None:
    launch(bench, PLANTED[name].corrected or "")
    assert bench.report.findings == ()


def test_call_chain_of_a_finding(bench: Bench) -> None:
    with pytest.raises(KernelFault) as caught:
        launch(bench, "\n  out[i] = load(x, i + 1);")
    (finding,) = caught.value.report.findings
    assert str(finding.location) == "planted.metal:1"
    assert [str(place) for place in finding.callers] == ["planted.metal:14"]
    assert "of x (1024 bytes)" in finding.message


def test_race_names_both_threads_and_the_variable(bench: Bench) -> None:
    with pytest.raises(KernelFault) as caught:
        launch(bench, PLANTED["missing barrier"].source)
    (finding,) = [f for f in caught.value.report.findings if f.location and f.location.line == 19]
    assert "threadgroup variable s" in finding.message
    assert "conflicts with thread" in finding.message and "planted.metal:17" in finding.message


def test_output_that_is_not_written(bench: Bench) -> None:
    source = "  if (t != 5) out[i] = x[i];"
    with pytest.raises(KernelFault, match="8 of the 1024 bytes of out, the first at byte 20"):
        launch(bench, source)
    bench.configure(partial_outputs=frozenset({"out"}))
    launch(bench, source)


def test_missing_return(bench: Bench) -> None:
    with pytest.raises(KernelFault) as caught:
        launch(bench, "  out[i] = sign_of(x[i]);")
    assert Kind.MISSING_RETURN in caught.value.report.kinds()


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (Kind.TIMEOUT, f"  volatile int n = 0;\n  while (x[0] == 0) n = n + 1; {MARK}\n  out[i] = n;"),
        (Kind.WILD_POINTER, f"  volatile float y = x[i];\n  y = *(const device float*)(8ul + ulong(y)); {MARK}\n  out[i] = y;"),
        (
            Kind.STACK_OVERFLOW,
            f"  volatile float big[100000];\n  big[lane] = x[i]; {MARK}\n  out[i] = big[lane];",
        ),
    ],
    ids=["endless loop", "null pointer", "stack overflow"],
)  # fmt: skip
def test_crash_is_a_finding_and_the_bench_goes_on(bench: Bench, kind: Kind, source: str, checked: bool) -> None:
    bench.configure(checked=checked, timeout=1)
    with pytest.raises(KernelFault) as caught:
        launch(bench, source)
    assert caught.value.report.aborted
    found = [f for f in caught.value.report.findings if f.kind is kind]
    assert found, str(caught.value)
    if kind is not Kind.STACK_OVERFLOW:  # which is at the function's beginning
        places = {place for f in found for place in (f.location, *f.callers) if place}
        assert {p.file for p in places} == {"planted.metal"}
        assert {p.line for p in places} & {marked_line(source), marked_line(source) - 1}, str(caught.value)
    assert launch(bench, "  out[i] = 3;").sum().item() == 3 * 2 * THREADS


def test_divergence_is_found_unchecked_too(bench: Bench) -> None:
    bench.configure(checked=False)
    with pytest.raises(KernelFault) as caught:
        launch(bench, PLANTED["threads return before a barrier"].source)
    assert caught.value.report.kinds() == {Kind.DIVERGENT_BARRIER}


def test_too_large_threadgroup(bench: Bench) -> None:
    kernel = bench.metal_kernel("wide", ["x"], ["out"], "out[0] = x[0];")
    with pytest.raises(BenchError, match="1056 threads"):
        kernel(
            inputs=[mx.zeros(8)], grid=(1056, 1, 1), threadgroup=(1056, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip
