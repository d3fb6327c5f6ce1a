// bfloat: widens to float by itself, narrows only when asked (as in Metal 3.1 and later), and rounds
// to nearest even after every operation.
#pragma once

namespace bench {
METAL_FUNC constexpr ushort bfloat_bits(float value) {
  uint x = __builtin_bit_cast(uint, value);
  if ((x & 0x7fffffffu) > 0x7f800000u) return ushort((x >> 16) | 0x40u);  // NaN stays a NaN
  return ushort((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}
}  // namespace bench

struct bfloat {
  ushort bits_;
  bfloat() = default;
  template <int = 0> constexpr bfloat(const __constant bfloat& o) : bits_(o.bits_) {}
  constexpr explicit bfloat(float f) : bits_(bench::bfloat_bits(f)) {}
  constexpr explicit bfloat(half f) : bits_(bench::bfloat_bits(float(f))) {}
  template <typename I, typename = bench::enable_if_t<bench::is_integer_v<I>>>
  constexpr bfloat(I i) : bits_(bench::bfloat_bits(float(i))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint(bits_) << 16); }
  constexpr operator float() const __constant { return __builtin_bit_cast(float, uint(bits_) << 16); }
  constexpr bfloat operator-() const { return __builtin_bit_cast(bfloat, ushort(bits_ ^ 0x8000)); }
};

#define BENCH_BFLOAT_OPERATOR(op)                                                                       \
  METAL_FUNC constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }  \
  template <typename I, typename = bench::enable_if_t<bench::is_integer_v<I>>>                          \
  METAL_FUNC constexpr bfloat operator op(bfloat a, I b) { return bfloat(float(a) op float(bfloat(b))); } \
  template <typename I, typename = bench::enable_if_t<bench::is_integer_v<I>>>                          \
  METAL_FUNC constexpr bfloat operator op(I a, bfloat b) { return bfloat(float(bfloat(a)) op float(b)); } \
  METAL_FUNC __private bfloat& operator op##=(__private bfloat& a, bfloat b) { a = a op b; return a; }  \
  METAL_FUNC __global bfloat& operator op##=(__global bfloat& a, bfloat b) { bfloat t = a; a = t op b; return a; } \
  METAL_FUNC __local bfloat& operator op##=(__local bfloat& a, bfloat b) { bfloat t = a; a = t op b; return a; }
BENCH_BFLOAT_OPERATOR(+)
BENCH_BFLOAT_OPERATOR(-)
BENCH_BFLOAT_OPERATOR(*)
BENCH_BFLOAT_OPERATOR(/)
#undef BENCH_BFLOAT_OPERATOR
