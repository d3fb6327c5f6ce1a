"""The mutation script tells a barrier that is needed from one that is not."""

import mlx.core as mx
import numpy as np
from bench import Bench
from mutate import Barrier, Factory, barriers, kernel_barriers, survivors, without

HEADER = """#line 1 "shared.metal"
inline float exchanged(threadgroup float* s, float x, uint t) {
  s[t] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return s[63 - t];
}
"""
SOURCE = """
#line 20 "twice.metal"
  threadgroup float s[64];
  const uint t = thread_index_in_threadgroup;
  const float y = exchanged(s, x[t], t);  // threadgroup_barrier(mem_flags::mem_threadgroup) would be wrong here
  threadgroup_barrier(
      mem_flags::mem_threadgroup);
  const float z = exchanged(s, y, t);
  threadgroup_barrier(mem_flags::mem_device);
  out[t] = z;
"""
NEEDED = [
    Barrier("shared.metal", 3, "threadgroup_barrier(mem_flags::mem_threadgroup)"),
    Barrier("twice.metal", 23, "threadgroup_barrier(\n      mem_flags::mem_threadgroup)"),
]
REDUNDANT = Barrier("twice.metal", 26, "threadgroup_barrier(mem_flags::mem_device)")
ELSEWHERE = Barrier("another.metal", 1, "threadgroup_barrier(mem_flags::mem_none)")


def run(factory: Factory, file: str) -> None:
    kernel = factory(name="twice", input_names=["x"], output_names=["out"], source=SOURCE, header=HEADER)
    x = mx.random.normal((64,))
    (out,) = kernel(
        inputs=[x], grid=(64, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(64,)], output_dtypes=[mx.float32]
    )
    assert np.array_equal(np.array(out), np.array(x))


def test_survivors(bench: Bench) -> None:
    run(bench.metal_kernel, "")
    found = barriers(HEADER) + barriers(SOURCE)
    assert found == [*NEEDED, REDUNDANT]
    assert list(survivors(bench, [*found, ELSEWHERE], run)) == [
        (REDUNDANT, "no check fails"),
        (ELSEWHERE, "the cases do not use it"),
    ]


def test_lines_are_kept() -> None:
    mutated = without(SOURCE, NEEDED[1])
    assert mutated.count("\n") == SOURCE.count("\n")
    assert barriers(mutated) == [REDUNDANT]


def test_kernels_have_barriers() -> None:
    found = kernel_barriers()
    assert found and all(barrier.file.endswith(".metal") and barrier.line > 1 for barrier in found)
