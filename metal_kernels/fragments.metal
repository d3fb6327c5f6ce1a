// Shared by every kernel: 8x8 simdgroup matrices kept in registers, and 16-byte loads that feed them.
//
// Contractions do not care about the order of the contracted index, so a lane loads 16 contiguous bytes (a
// "piece") and spreads its elements over several 8x8 fragments, instead of loading each fragment by itself.
// All operands are converted to float first; half precision would not be faster on Apple GPUs.

#include <metal_simdgroup_matrix>

// A lane's place in an 8x8 simdgroup matrix: it holds (row, col) and (row, col + 1). MLX's own kernels rely
// on the same layout.
METAL_FUNC int fragment_row(uint lane) {
  return int((lane >> 2 & 4) | (lane >> 1 & 3));
}
METAL_FUNC int fragment_col(uint lane) {
  return int((lane >> 1 & 4) | (lane & 1) << 1);
}

// sum += a b, all 8x8.
METAL_FUNC void multiply_add(thread float2& sum, float2 a, float2 b) {
  simdgroup_matrix<float, 8, 8> A, B, C;
  reinterpret_cast<thread float2&>(A.thread_elements()) = a;
  reinterpret_cast<thread float2&>(B.thread_elements()) = b;
  reinterpret_cast<thread float2&>(C.thread_elements()) = sum;
  simdgroup_multiply_accumulate(C, A, B, C);
  sum = reinterpret_cast<thread float2&>(C.thread_elements());
}

// Column-wise reductions of a fragment, the result in every lane of the column.
METAL_FUNC float2 max_over_rows(float2 x) {
  x = max(x, simd_shuffle_xor(x, 2));
  x = max(x, simd_shuffle_xor(x, 4));
  return max(x, simd_shuffle_xor(x, 16));
}
METAL_FUNC float2 sum_over_rows(float2 x) {
  x += simd_shuffle_xor(x, 2);
  x += simd_shuffle_xor(x, 4);
  return x + simd_shuffle_xor(x, 16);
}

// A piece is PIECE = 16 / sizeof(T) neighbouring elements, as PIECE / 2 pairs of floats.
template <typename T>
struct Piece;

template <>
struct Piece<float> {
  float2 pair[2];
  void unpack(uint4 bits) thread {
    pair[0] = as_type<float2>(bits.xy);
    pair[1] = as_type<float2>(bits.zw);
  }
};

template <>
struct Piece<half> {
  float2 pair[4];
  void unpack(uint4 bits) thread {
    for (int i = 0; i < 4; i++) {
      pair[i] = float2(as_type<half2>(bits[i]));
    }
  }
};

template <>
struct Piece<bfloat> {
  float2 pair[4];
  void unpack(uint4 bits) thread {
    for (int i = 0; i < 4; i++) {
      pair[i] = float2(as_type<float>(bits[i] << 16), as_type<float>(bits[i] & 0xffff0000u));
    }
  }
};

// Loads the piece at `source`, or zeros: memory outside the valid range is never touched.
template <typename T>
METAL_FUNC Piece<T> load_piece(const device T* source, bool valid) {
  Piece<T> piece;
  piece.unpack(valid ? *reinterpret_cast<const device uint4*>(source) : uint4(0));
  return piece;
}
