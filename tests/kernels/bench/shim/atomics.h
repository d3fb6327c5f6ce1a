// Atomics: one OS thread runs all lanes, so a plain read-modify-write is atomic. They are checked for bounds
// and counted, and do not race with each other.
#pragma once
#define BENCH_ATOMIC BENCH_UNCHECKED __attribute__((noinline))

namespace metal {
template <typename T> struct atomic { T v; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;

// What Metal has: everything for 32-bit integers, add and sub for float.
template <typename T> inline constexpr __constant bool atomic_integer_v = is_same_v<T, int> || is_same_v<T, uint>;
template <typename T> inline constexpr __constant bool atomic_number_v = atomic_integer_v<T> || is_same_v<T, float>;
template <typename T> inline constexpr __constant bool atomic_value_v = atomic_number_v<T> || is_same_v<T, bool>;

#define BENCH_FETCH(space, name, allowed, expression)                                            \
  template <typename T>                                                                          \
  BENCH_ATOMIC T atomic_fetch_##name##_explicit(volatile space atomic<T>* p, T x, memory_order) { \
    static_assert(allowed<T>, "atomic_fetch_" #name ": type not supported by Metal");            \
    bench_atomic(p, sizeof(T), 1);                                                               \
    T old = p->v;                                                                                \
    p->v = expression;                                                                           \
    return old;                                                                                  \
  }
#define BENCH_ATOMICS(space)                                                                     \
  template <typename T> BENCH_ATOMIC T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) { \
    static_assert(atomic_value_v<T>, "atomic_load: type not supported by Metal");                \
    bench_atomic(p, sizeof(T), 0);                                                               \
    return p->v;                                                                                 \
  }                                                                                              \
  template <typename T> BENCH_ATOMIC void atomic_store_explicit(volatile space atomic<T>* p, T x, memory_order) { \
    static_assert(atomic_value_v<T>, "atomic_store: type not supported by Metal");               \
    bench_atomic(p, sizeof(T), 1);                                                               \
    p->v = x;                                                                                    \
  }                                                                                              \
  template <typename T>                                                                          \
  BENCH_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* p, __private T* expected, T x, \
                                                          memory_order, memory_order) {          \
    bench_atomic(p, sizeof(T), 1);                                                               \
    T old = p->v;                                                                                \
    if (old == *expected) { p->v = x; return true; }                                             \
    *expected = old;                                                                             \
    return false;                                                                                \
  }                                                                                              \
  BENCH_FETCH(space, add, atomic_number_v, old + x)                                              \
  BENCH_FETCH(space, sub, atomic_number_v, old - x)                                              \
  BENCH_FETCH(space, max, atomic_integer_v, old < x ? x : old)                                   \
  BENCH_FETCH(space, min, atomic_integer_v, x < old ? x : old)                                   \
  BENCH_FETCH(space, and, atomic_integer_v, old & x)                                             \
  BENCH_FETCH(space, or, atomic_integer_v, old | x)                                              \
  BENCH_FETCH(space, xor, atomic_integer_v, old ^ x)                                             \
  template <typename T> BENCH_ATOMIC T atomic_exchange_explicit(volatile space atomic<T>* p, T x, memory_order) { \
    static_assert(atomic_value_v<T>, "atomic_exchange: type not supported by Metal");            \
    bench_atomic(p, sizeof(T), 1);                                                               \
    T old = p->v;                                                                                \
    p->v = x;                                                                                    \
    return old;                                                                                  \
  }
BENCH_ATOMICS(__global)
BENCH_ATOMICS(__local)
}  // namespace metal
