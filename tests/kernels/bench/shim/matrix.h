// simdgroup_matrix: 8x8, two neighbouring elements of a row in each lane, in the layout that MLX's steel
// kernels rely on (mlx/backend/metal/kernels/steel/gemm/mma.h).
#pragma once

namespace metal {
template <typename T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "Metal has 8x8 simdgroup matrices only");
  vec<T, 2> e;
  simdgroup_matrix() = default;
  METAL_FUNC explicit simdgroup_matrix(T diagonal) {
    for (int k = 0; k < 2; k++) e.v[k] = row() == column() + k ? diagonal : T(0);
  }
  METAL_FUNC static int row() { int l = bench_lane(); return ((l / 4) & 4) + (l / 2) % 4; }
  METAL_FUNC static int column() { int l = bench_lane(); return ((l / 4) & 2) * 2 + (l % 2) * 2; }
  METAL_FUNC static int lane_of(int r, int c) { return (r & 4) * 4 + (c & 4) * 2 + (r & 3) * 2 + ((c & 2) >> 1); }
  METAL_FUNC __private vec<T, 2>& thread_elements() __private { return e; }
  METAL_FUNC const __private vec<T, 2>& thread_elements() const __private { return e; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T, int R, int C = R> METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.e = vec<T, 2>(value, value);
  return m;
}

// D = A B + C, products and sums in float32.
template <typename TD, typename TA, typename TB, typename TC>
BENCH_UNCHECKED inline void simdgroup_multiply_accumulate(
    __private simdgroup_matrix<TD, 8, 8>& D, __private simdgroup_matrix<TA, 8, 8>& A,
    __private simdgroup_matrix<TB, 8, 8>& B, __private simdgroup_matrix<TC, 8, 8>& C, bench::site s = bench::here()) {
  struct operands { vec<TA, 2> a; vec<TB, 2> b; };
  typedef simdgroup_matrix<TD, 8, 8> M;
  operands mine;
  mine.a = A.e;
  mine.b = B.e;
  float sum0 = float(C.e.v[0]), sum1 = float(C.e.v[1]);
  bench::posts<operands> p(mine, BENCH_MATRIX_MULTIPLY, s);
  int row = M::row(), column = M::column();
  for (int k = 0; k < 8; k++) {
    operands left = p.at(M::lane_of(row, k)), right = p.at(M::lane_of(k, column));
    float a = float(left.a.v[k & 1]);
    sum0 += a * float(right.b.v[0]);
    sum1 += a * float(right.b.v[1]);
  }
  D.e = vec<TD, 2>(TD(sum0), TD(sum1));
}
template <typename TD, typename TA, typename TB>
METAL_FUNC void simdgroup_multiply(__private simdgroup_matrix<TD, 8, 8>& D, __private simdgroup_matrix<TA, 8, 8>& A,
                                   __private simdgroup_matrix<TB, 8, 8>& B, bench::site s = bench::here()) {
  simdgroup_matrix<TD, 8, 8> zero;
  zero.e = vec<TD, 2>(TD(0));
  simdgroup_multiply_accumulate(D, A, B, zero, s);
}

// The whole simdgroup must take part, but a load or store orders no memory.
#define BENCH_MATRIX_MEMORY(space)                                                                           \
  template <typename T>                                                                                      \
  METAL_FUNC void simdgroup_load(__private simdgroup_matrix<T, 8, 8>& m, const space T* from, ulong stride = 8, \
                                 ulong2 origin = ulong2(0), bool transpose = false, bench::site s = bench::here()) { \
    simdgroup_barrier(mem_flags::mem_none, s);                                                               \
    for (int k = 0; k < 2; k++) {                                                                            \
      int r = transpose ? m.column() + k : m.row(), c = transpose ? m.row() : m.column() + k;                \
      m.e.v[k] = from[(r + origin.y) * stride + c + origin.x];                                               \
    }                                                                                                        \
  }                                                                                                          \
  template <typename T>                                                                                      \
  METAL_FUNC void simdgroup_store(__private simdgroup_matrix<T, 8, 8>& m, space T* to, ulong stride = 8,     \
                                  ulong2 origin = ulong2(0), bool transpose = false, bench::site s = bench::here()) { \
    simdgroup_barrier(mem_flags::mem_none, s);                                                               \
    for (int k = 0; k < 2; k++) {                                                                            \
      int r = transpose ? m.column() + k : m.row(), c = transpose ? m.row() : m.column() + k;                \
      to[(r + origin.y) * stride + c + origin.x] = m.e.v[k];                                                 \
    }                                                                                                        \
  }
BENCH_MATRIX_MEMORY(__global)
BENCH_MATRIX_MEMORY(__local)
}  // namespace metal
