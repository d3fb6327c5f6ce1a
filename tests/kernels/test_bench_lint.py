"""Every construct of the list is rejected, at its line, and MLX's traps around it too."""

import mlx.core as mx
import pytest
from bench import Bench, SourceRejected
from bench.lint import RULES, Rule

BODY = "\n  threadgroup float shared[4];\n  shared[0] = x[0];\n"


def run(bench: Bench, source: str, header: str = "") -> None:
    kernel = bench.metal_kernel("linted", ["x"], ["out"], source, header)
    kernel(
        inputs=[mx.zeros(8)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)], output_dtypes=[mx.float32]
    )


@pytest.mark.parametrize("rule", RULES, ids=[rule.construct for rule in RULES])
def test_construct_is_rejected_at_its_line(bench: Bench, rule: Rule) -> None:
    with pytest.raises(SourceRejected) as caught:
        if rule.at_program_scope:
            run(bench, BODY + "  out[0] = 0;", f"\n\n{rule.example}\n")
        else:
            run(bench, f"{BODY}  {rule.example}\n")
    text = str(caught.value)
    assert ("linted (header):3:" if rule.at_program_scope else "linted:4:") in text
    if rule.detector or rule.in_syntax_tree:
        assert rule.reason in text


def test_what_metal_accepts_is_accepted(bench: Bench) -> None:
    header = """
#include <metal_simdgroup_matrix>
#define UNROLL _Pragma("clang loop unroll(full)")
constant constexpr float TABLE[2] = {1, 2};
constexpr constant int SIZE = 4;
enum class Mode : uint { one, two };
using pair = float2;
typedef const device float* input_pointer;
template <typename T, int N = SIZE>
struct View {
  const device T* data;
  threadgroup float* scratch;
  int stride;
  T at(int i) const thread { return data[i * stride]; }
  void put(int i, float value) thread { scratch[i] = value; }
};
template <typename T>
METAL_FUNC void grow(thread T& x, thread float (&all)[SIZE]) { x += all[0]; }
inline float total(thread const float* from, const int count) {
  float sum = 0;
  UNROLL for (int i = 0; i < count; i++) sum += from[i];
  return sum;
}
METAL_FUNC float pick(input_pointer p, const constant float& scale, Mode mode = Mode::one) {
  return mode == Mode::one ? p[0] * scale : p[1];
}
"""
    source = """
  threadgroup float shared[SIZE], more[2][3];
  threadgroup float (*rows)[3] = more;
  View<float> view{x, shared, 1};
  device auto* target = out;
  const device void* raw = x;
  const device uint4* vectors = reinterpret_cast<const device uint4*>(raw);
  thread float values[SIZE] = {1, 2, 3, 4};
  float sum = total(values, SIZE) * 0.5 + pick(x, TABLE[0]);
  grow(sum, values);
  view.put(0, view.at(1));
  rows[1][2] = as_type<float>(vectors[0].y);
  switch (SIZE) { case 4: sum += rows[1][2]; break; default: break; }
  do { sum += 1; } while (sum < 0);
  static_assert(sizeof(pair) == 8, "two floats");
  simdgroup_float8x8 matrix(0);
  thread auto& element = matrix.thread_elements();
  target[0] = sum + element[0] + (x == raw ? shared[0] : values[1]);
"""
    run(bench, source, header)


@pytest.mark.parametrize(
    ("names", "source", "complaint"),
    [
        (["x"], "int max_shape = 1; out[0] = max_shape;", "x_shape because the source"),
        (["x"], "// x_strides are not used\nout[0] = x[0];", "argument x_strides because the source has a comment"),
        (["x"], "int my_grid_size = 3; out[0] = 3;", "argument grid_size because the source has my_grid_size"),
        ([f"x{n}_" for n in range(31)], "out[0] = 1;", "32 buffers; Metal has 31"),
    ],
    ids=["inside a word", "in a comment", "attribute", "buffers"],
)  # fmt: skip
def test_traps_of_mlx(bench: Bench, names: list[str], source: str, complaint: str) -> None:
    kernel = bench.metal_kernel("trapped", names, ["out"], source)
    with pytest.raises(SourceRejected, match=complaint):
        kernel(
            inputs=[mx.zeros(8)] * len(names), grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip


def test_names_that_are_meant_are_no_traps(bench: Bench) -> None:
    run(bench, "out[0] = x_shape[0] + x_ndim + threads_per_threadgroup.x + dispatch_threads_per_threadgroup.y;")
