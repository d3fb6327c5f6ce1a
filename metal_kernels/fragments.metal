// Shared by every kernel: 8x8 simdgroup matrices kept in registers, and 16-byte loads that feed them.
//
// Contractions do not care about the order of the contracted index, so a lane loads 16 contiguous bytes (a
// "piece") and spreads its elements over several 8x8 fragments, instead of loading each fragment by itself.
// All operands are converted to float first; half precision would not be faster on Apple GPUs.

#include <metal_simdgroup_matrix>

// For every loop that indexes an array kept in registers. The bench defines it away, for quick compiles.
#ifndef UNROLL
#define UNROLL _Pragma("clang loop unroll(full)")
#endif

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
    UNROLL for (int i = 0; i < 4; i++) {
      pair[i] = float2(as_type<half2>(bits[i]));
    }
  }
};

template <>
struct Piece<bfloat> {
  float2 pair[4];
  void unpack(uint4 bits) thread {
    UNROLL for (int i = 0; i < 4; i++) {
      pair[i] = float2(as_type<float>(bits[i] << 16), as_type<float>(bits[i] & 0xffff0000u));
    }
  }
};

METAL_FUNC uint4 pack(Piece<float> piece) {
  return uint4(as_type<uint2>(piece.pair[0]), as_type<uint2>(piece.pair[1]));
}
METAL_FUNC uint4 pack(Piece<half> piece) {
  uint4 bits;
  UNROLL for (int i = 0; i < 4; i++) {
    bits[i] = as_type<uint>(half2(piece.pair[i]));
  }
  return bits;
}
METAL_FUNC uint4 pack(Piece<bfloat> piece) {
  uint4 bits;
  UNROLL for (int i = 0; i < 4; i++) {
    bits[i] = as_type<ushort>(bfloat(piece.pair[i].x)) | uint(as_type<ushort>(bfloat(piece.pair[i].y))) << 16;
  }
  return bits;
}

template <typename T>
METAL_FUNC uint4 load_bits(const device T* source) {
  return *reinterpret_cast<const device uint4*>(source);
}

// Loads the piece at `source`, or zeros: memory outside the valid range is never touched.
template <typename T>
METAL_FUNC Piece<T> load_piece(const device T* source, bool valid) {
  Piece<T> piece;
  piece.unpack(valid ? load_bits(source) : uint4(0));
  return piece;
}

// A piece of two rows' elements 0, 2, 4, ..., row by row: the right-hand operand that goes with load_piece.
template <typename T>
METAL_FUNC uint4 interleave(const device T* first, const device T* second, bool has_first, bool has_second) {
  uint4 bits = 0;
  UNROLL for (int i = 0; i < 16 / int(sizeof(T)); i++) {
    if (i % 2 ? has_second : has_first) {
      const device T* from = (i % 2 ? second : first) + i / 2 * 2;
      const uint raw = sizeof(T) == 4 ? *reinterpret_cast<const device uint*>(from)
                                      : *reinterpret_cast<const device ushort*>(from);
      bits[i * sizeof(T) / 4] |= sizeof(T) == 4 ? raw : raw << (16 * (i % 2));
    }
  }
  return bits;
}
