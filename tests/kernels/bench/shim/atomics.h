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

#define BENCH_FETCH(space, name, expression)                                                     \
  template <typename T>                                                                          \
  BENCH_ATOMIC T atomic_fetch_##name##_explicit(volatile space atomic<T>* p, T x, memory_order) { \
    bench_atomic(p, sizeof(T), 1);                                                               \
    T old = p->v;                                                                                \
    p->v = expression;                                                                           \
    return old;                                                                                  \
  }
#define BENCH_ATOMICS(space)                                                                     \
  template <typename T> BENCH_ATOMIC T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) { \
    bench_atomic(p, sizeof(T), 0);                                                               \
    return p->v;                                                                                 \
  }                                                                                              \
  template <typename T> BENCH_ATOMIC void atomic_store_explicit(volatile space atomic<T>* p, T x, memory_order) { \
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
  BENCH_FETCH(space, add, old + x) BENCH_FETCH(space, sub, old - x)                              \
  BENCH_FETCH(space, max, old < x ? x : old) BENCH_FETCH(space, min, x < old ? x : old)          \
  BENCH_FETCH(space, and, old & x) BENCH_FETCH(space, or, old | x) BENCH_FETCH(space, xor, old ^ x) \
  template <typename T> BENCH_ATOMIC T atomic_exchange_explicit(volatile space atomic<T>* p, T x, memory_order) { \
    bench_atomic(p, sizeof(T), 1);                                                               \
    T old = p->v;                                                                                \
    p->v = x;                                                                                    \
    return old;                                                                                  \
  }
BENCH_ATOMICS(__global)
BENCH_ATOMICS(__local)
}  // namespace metal
