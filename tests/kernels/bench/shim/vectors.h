// vec<T, N>, packed vectors, numeric_limits and as_type. The vector classes themselves and the maths
// functions over them are generated (vectors.py): Metal's swizzles need a property for each.
#pragma once

namespace metal {
template <typename T, int N> struct vec;
}

namespace bench {
// The scalar of the native vector that stands for a vec in memory, so that it is loaded and stored in one access, as on
// a GPU. Copied component by component, it would be counted as several.
template <typename T> struct native { typedef T type; };
template <> struct native<bfloat> { typedef ushort type; };
template <> struct native<bool> { typedef uchar type; };

template <typename X> struct components { static constexpr __constant int n = is_scalar_v<X> ? 1 : 1000; };
template <typename T, int N> struct components<metal::vec<T, N>> { static constexpr __constant int n = N; };
template <typename T, typename X> METAL_FUNC constexpr T component(X x, int i) { return T(x); }
template <typename T, typename U, int N> METAL_FUNC constexpr T component(metal::vec<U, N> x, int i);

// Component i of the concatenation of scalars and vectors: float4(float2, float, float).
template <typename T, typename A> METAL_FUNC constexpr T pick(int i, A a) { return component<T>(a, i); }
template <typename T, typename A, typename B, typename... R>
METAL_FUNC constexpr T pick(int i, A a, B b, R... r) {
  if (i < components<A>::n) return component<T>(a, i);
  return pick<T>(i - components<A>::n, b, r...);
}
}  // namespace bench

namespace metal {
#include "generated_vectors.h"
}

namespace bench {
template <typename T, typename U, int N> METAL_FUNC constexpr T component(metal::vec<U, N> x, int i) {
  if constexpr (N == 2) return T(i == 0 ? x.x : x.y);
  else if constexpr (N == 3) return T(i == 0 ? x.x : i == 1 ? x.y : x.z);
  else return T(i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w);
}

template <typename T, int N> struct packed {
  T v[N];
  packed() = default;
  packed(metal::vec<T, N> o) { for (int i = 0; i < N; i++) v[i] = o.v[i]; }
  operator metal::vec<T, N>() const {
    metal::vec<T, N> r;
    for (int i = 0; i < N; i++) r.v[i] = v[i];
    return r;
  }
  T& operator[](int i) { return v[i]; }
  T operator[](int i) const { return v[i]; }
};
}  // namespace bench

#define BENCH_VECTORS(t) using t##2 = metal::vec<t, 2>; using t##3 = metal::vec<t, 3>; using t##4 = metal::vec<t, 4>;
#define BENCH_PACKED(t)                                                                            \
  using packed_##t##2 = bench::packed<t, 2>; using packed_##t##3 = bench::packed<t, 3>;            \
  using packed_##t##4 = bench::packed<t, 4>;
#define BENCH_IMPORT(t) using ::t##2; using ::t##3; using ::t##4;
#define BENCH_NUMBERS(f) f(char) f(uchar) f(short) f(ushort) f(int) f(uint) f(half) f(float) f(bfloat)
BENCH_NUMBERS(BENCH_VECTORS) BENCH_VECTORS(bool) BENCH_VECTORS(long) BENCH_VECTORS(ulong)
BENCH_NUMBERS(BENCH_PACKED)
namespace metal { BENCH_NUMBERS(BENCH_IMPORT) BENCH_IMPORT(bool) BENCH_IMPORT(long) BENCH_IMPORT(ulong) }

namespace metal {
template <typename T> struct numeric_limits;
#define BENCH_INTEGER_LIMITS(t, lo, hi, sign)                               \
  template <> struct numeric_limits<t> {                                    \
    static constexpr t max() { return hi; }                                 \
    static constexpr t min() { return lo; }                                 \
    static constexpr t lowest() { return lo; }                              \
    static constexpr __constant bool is_signed = sign;                      \
    static constexpr __constant int digits = sizeof(t) * 8 - sign;          \
  };
BENCH_INTEGER_LIMITS(char, -128, 127, 1)
BENCH_INTEGER_LIMITS(signed char, -128, 127, 1)
BENCH_INTEGER_LIMITS(uchar, 0, 255, 0)
BENCH_INTEGER_LIMITS(short, -32768, 32767, 1)
BENCH_INTEGER_LIMITS(ushort, 0, 65535, 0)
BENCH_INTEGER_LIMITS(int, INT_MIN, INT_MAX, 1)
BENCH_INTEGER_LIMITS(uint, 0, UINT_MAX, 0)
BENCH_INTEGER_LIMITS(long, (-9223372036854775807L - 1), 9223372036854775807L, 1)
BENCH_INTEGER_LIMITS(ulong, 0, 18446744073709551615UL, 0)
BENCH_INTEGER_LIMITS(bool, false, true, 0)
#define BENCH_FLOAT_LIMITS(t, bits, largest, smallest, eps, inf, nan)                           \
  template <> struct numeric_limits<t> {                                                        \
    static constexpr t max() { return __builtin_bit_cast(t, (bits)largest); }                   \
    static constexpr t min() { return __builtin_bit_cast(t, (bits)smallest); }                  \
    static constexpr t lowest() { return -max(); }                                              \
    static constexpr t epsilon() { return __builtin_bit_cast(t, (bits)eps); }                   \
    static constexpr t infinity() { return __builtin_bit_cast(t, (bits)inf); }                  \
    static constexpr t quiet_NaN() { return __builtin_bit_cast(t, (bits)nan); }                 \
    static constexpr __constant bool is_signed = true;                                          \
  };
BENCH_FLOAT_LIMITS(float, uint, 0x7f7fffff, 0x00800000, 0x34000000, 0x7f800000, 0x7fc00000)
BENCH_FLOAT_LIMITS(half, ushort, 0x7bff, 0x0400, 0x1400, 0x7c00, 0x7e00)
BENCH_FLOAT_LIMITS(bfloat, ushort, 0x7f7f, 0x0080, 0x3c00, 0x7f80, 0x7fc0)

template <typename T, size_t N> struct array {
  T __elems[N];
  T& operator[](size_t i) { return __elems[i]; }
  T operator[](size_t i) const { return __elems[i]; }
  constexpr size_t size() const { return N; }
};
template <typename T> struct uniform {
  T v;
  constexpr uniform(T x) : v(x) {}
  template <typename U, typename = enable_if_t<bench::is_scalar_v<U>>> constexpr uniform(U x) : v(T(x)) {}
  constexpr operator T() const { return v; }
};
template <typename T> METAL_FUNC constexpr uniform<T> make_uniform(T x) { return uniform<T>(x); }
// MLX's logging.h declares one at program scope.
struct os_log {
  constexpr os_log(const __constant char*, const __constant char*) __constant {}
  constexpr os_log(const __constant char*, const __constant char*) {}
  template <typename... A> void log_debug(const __constant char*, A...) const {}
  template <typename... A> void log_debug(const __constant char*, A...) const __constant {}
};
}  // namespace metal

template <typename T, typename U> METAL_FUNC constexpr T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  T r;
  __builtin_memcpy_inline(&r, &x, sizeof(T));
  return r;
}
namespace metal { using ::as_type; }

namespace bench {
// Operand of a conditional expression (rewrite.py): clang does not unify class operands that live in different
// address spaces, where Metal's built-in vectors and bfloat do. Class values are copied, the rest is passed on.
template <typename T> inline constexpr __constant bool is_class_v = __is_class(T) || __is_union(T);
template <typename T>
using plain_t = metal::remove_cv_t<metal::remove_addrspace_t<metal::remove_cv_t<metal::remove_reference_t<T>>>>;
template <typename T>
METAL_FUNC constexpr metal::conditional_t<is_class_v<plain_t<T>>, plain_t<T>, T&&> operand(T&& x) {
  return static_cast<T&&>(x);
}

// Arguments of the kernel: an address becomes whatever pointer or reference the parameter wants.
struct pointer_argument {
  ulong p;
  template <typename T> METAL_FUNC operator __global T*() const { return (__global T*)p; }
  template <typename T> METAL_FUNC operator __constant T*() const { return (__constant T*)p; }
};
struct reference_argument {
  ulong p;
  template <typename T> METAL_FUNC operator __constant T&() const { return *(__constant T*)p; }
};
METAL_FUNC uint3 attribute3(int id) { uint o[3]; bench_attribute(id, o); return uint3(o[0], o[1], o[2]); }
METAL_FUNC uint attribute1(int id) { uint o[3]; bench_attribute(id, o); return o[0]; }
}  // namespace bench
