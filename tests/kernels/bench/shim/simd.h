// Barriers and simdgroup collectives. Every active lane of a simdgroup posts its value to the runtime; when no
// lane can go further, the lanes that wait at the same call site get the table of posts and go on.
#pragma once
#define BENCH_UNCHECKED __attribute__((no_sanitize("thread")))

namespace metal {
enum class mem_flags : uint {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
METAL_FUNC constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags flags, bench::site s = bench::here()) {
  bench_threadgroup_barrier(uint(flags), s.file, s.place);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, bench::site s = bench::here()) {
  bench_simdgroup_barrier(uint(flags), s.file, s.place);
}
enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
METAL_FUNC void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}
}  // namespace metal

namespace bench {
// The types that Metal's simdgroup functions accept: no 64-bit integers, no bool.
template <typename T> struct collective_type {
  static constexpr __constant bool value =
      is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, int> || is_same_v<T, uint> || is_same_v<T, short> ||
      is_same_v<T, ushort> || is_same_v<T, char> || is_same_v<T, uchar> || is_same_v<T, int8_t>;
};
template <typename T, int N> struct collective_type<metal::vec<T, N>> : collective_type<T> {};

// Mirrors Table in runtime/threads.h.
struct table {
  uchar post[32][64];
  uint reduced;
  uchar result[64];
};

template <typename T> struct posts {
  __private table* t;
  ulong mask;
  METAL_FUNC posts(T x, uint op, site s) {
    static_assert(sizeof(T) <= 64, "too large for a collective");
    ulong m;
    t = (__private table*)bench_exchange(&x, sizeof(T), op, s.file, s.place, &m);
    mask = m;
  }
  METAL_FUNC bool active(int i) const { return i >= 0 && i < 32 && (mask >> i & 1); }
  BENCH_UNCHECKED __attribute__((noinline)) static T load(const __private uchar* from) {
    T r;
    __builtin_memcpy_inline(&r, from, sizeof(T));
    return r;
  }
  METAL_FUNC T at(int i) const { return load(t->post[i]); }
  // A reduction gives every lane the same value: the first lane computes it for all.
  BENCH_UNCHECKED __attribute__((noinline)) bool reduced(__private T& x) const {
    if (t->reduced) __builtin_memcpy_inline(&x, t->result, sizeof(T));
    return t->reduced;
  }
  BENCH_UNCHECKED __attribute__((noinline)) void keep(T x) const {
    __builtin_memcpy_inline(t->result, &x, sizeof(T));
    t->reduced = 1;
  }
};

// Over the active lanes, in the order of a butterfly.
template <typename T, typename F> BENCH_UNCHECKED inline T reduce(T x, uint op, site s, F f) {
  posts<T> p(x, op, s);
  T value[32];
  if (p.reduced(value[0])) return value[0];
  int n = 0;
  for (int i = 0; i < 32; i++) if (p.active(i)) value[n++] = p.at(i);
  while (n > 1) {
    int half_way = (n + 1) / 2;
    for (int i = 0; i + half_way < n; i++) value[i] = f(value[i], value[i + half_way]);
    n = half_way;
  }
  p.keep(value[0]);
  return value[0];
}

template <typename T, typename F> BENCH_UNCHECKED inline T prefix(T x, uint op, site s, T start, bool inclusive, F f) {
  posts<T> p(x, op, s);
  T r = start;
  int self = bench_lane();
  for (int i = 0; i < self + inclusive; i++) if (p.active(i)) r = f(r, p.at(i));
  return r;
}

template <typename T> METAL_FUNC T shuffle(T x, uint op, site s, int source) {
  posts<T> p(x, op, s);
  if (p.active(source)) return p.at(source);
  bench_inactive_lane(s.file, s.place);
  return x;
}

template <typename T> struct pair { T x, fill; };
template <typename T> METAL_FUNC T shuffle_fill(T x, T fill, uint op, site s, int source) {
  pair<T> both;
  both.x = x;
  both.fill = fill;
  posts<pair<T>> p(both, op, s);
  return source < 0 ? p.at(source + 32).fill : source > 31 ? p.at(source - 32).fill : p.at(source).x;
}

METAL_FUNC ulong ballot(bool x, site s, __private ulong& active) {
  uint vote = x;
  posts<uint> p(vote, BENCH_BALLOT, s);
  ulong r = 0;
  for (int i = 0; i < 32; i++) if (p.active(i) && p.at(i)) r |= 1ul << i;
  active = p.mask;
  return r;
}
}  // namespace bench

namespace metal {
// MLX's bf16_math.h calls the __metal_ names.
#define BENCH_REDUCE(name, op, expression)                                                              \
  template <typename T> METAL_FUNC T name(T x, bench::site s = bench::here()) {                         \
    static_assert(bench::collective_type<T>::value, #name ": type not supported by Metal");             \
    return bench::reduce(x, op, s, [](T a, T b) { return T(expression); });                             \
  }                                                                                                     \
  template <typename T> METAL_FUNC T __metal_##name(T x, bench::site s = bench::here()) { return name(x, s); }
BENCH_REDUCE(simd_sum, BENCH_SUM, a + b)
BENCH_REDUCE(simd_product, BENCH_PRODUCT, a * b)
BENCH_REDUCE(simd_max, BENCH_MAX, max(a, b))
BENCH_REDUCE(simd_min, BENCH_MIN, min(a, b))
BENCH_REDUCE(simd_and, BENCH_AND, a & b)
BENCH_REDUCE(simd_or, BENCH_OR, a | b)
BENCH_REDUCE(simd_xor, BENCH_XOR, a ^ b)
METAL_FUNC float __metal_simd_xor(float x) { return x; }  // bf16_math.h names it for bfloat; it is never called

#define BENCH_PREFIX(name, op, inclusive, start, expression)                                            \
  template <typename T> METAL_FUNC T name(T x, bench::site s = bench::here()) {                         \
    static_assert(bench::collective_type<T>::value, #name ": type not supported by Metal");             \
    return bench::prefix(x, op, s, T(start), inclusive, [](T a, T b) { return T(expression); });        \
  }                                                                                                     \
  template <typename T> METAL_FUNC T __metal_##name(T x, bench::site s = bench::here()) { return name(x, s); }
BENCH_PREFIX(simd_prefix_inclusive_sum, BENCH_PREFIX_INCLUSIVE_SUM, true, 0, a + b)
BENCH_PREFIX(simd_prefix_exclusive_sum, BENCH_PREFIX_EXCLUSIVE_SUM, false, 0, a + b)
BENCH_PREFIX(simd_prefix_inclusive_product, BENCH_PREFIX_INCLUSIVE_PRODUCT, true, 1, a * b)
BENCH_PREFIX(simd_prefix_exclusive_product, BENCH_PREFIX_EXCLUSIVE_PRODUCT, false, 1, a * b)

// A source beyond the edge of simd_shuffle_up and _down leaves the lane's own value, as on Apple GPUs.
#define BENCH_SHUFFLE_FUNCTION(name, op, source)                                                        \
  template <typename T> METAL_FUNC T name(T x, ushort n, bench::site s = bench::here()) {               \
    static_assert(bench::collective_type<T>::value, #name ": type not supported by Metal");             \
    int self = bench_lane();                                                                            \
    return bench::shuffle(x, op, s, source);                                                            \
  }                                                                                                     \
  template <typename T> METAL_FUNC T __metal_##name(T x, ushort n, bench::site s = bench::here()) { return name(x, n, s); }
BENCH_SHUFFLE_FUNCTION(simd_shuffle, BENCH_SHUFFLE, ((void)self, int(n)))
BENCH_SHUFFLE_FUNCTION(simd_broadcast, BENCH_BROADCAST, ((void)self, int(n)))
BENCH_SHUFFLE_FUNCTION(simd_shuffle_xor, BENCH_SHUFFLE_XOR, self ^ int(n))
BENCH_SHUFFLE_FUNCTION(simd_shuffle_rotate_up, BENCH_SHUFFLE_ROTATE, (self - int(n)) & 31)
BENCH_SHUFFLE_FUNCTION(simd_shuffle_rotate_down, BENCH_SHUFFLE_ROTATE, (self + int(n)) & 31)
BENCH_SHUFFLE_FUNCTION(simd_shuffle_up, BENCH_SHUFFLE_UP, self - int(n) >= 0 ? self - int(n) : self)
BENCH_SHUFFLE_FUNCTION(simd_shuffle_down, BENCH_SHUFFLE_DOWN, self + int(n) < 32 ? self + int(n) : self)

template <typename T> METAL_FUNC T simd_shuffle_and_fill_up(T x, T fill, ushort n, bench::site s = bench::here()) {
  return bench::shuffle_fill(x, fill, BENCH_SHUFFLE_FILL_UP, s, int(bench_lane()) - n);
}
template <typename T> METAL_FUNC T simd_shuffle_and_fill_down(T x, T fill, ushort n, bench::site s = bench::here()) {
  return bench::shuffle_fill(x, fill, BENCH_SHUFFLE_FILL_DOWN, s, int(bench_lane()) + n);
}
template <typename T> METAL_FUNC T __metal_simd_shuffle_and_fill_up(T x, T fill, ushort n, ushort) { return simd_shuffle_and_fill_up(x, fill, n); }
template <typename T> METAL_FUNC T __metal_simd_shuffle_and_fill_down(T x, T fill, ushort n, ushort) { return simd_shuffle_and_fill_down(x, fill, n); }
METAL_FUNC ushort __metal_get_thread_index_in_simdgroup(ushort) { return bench_lane(); }
METAL_FUNC ushort __metal_get_simdgroup_size(ushort) { return 32; }

template <typename T> METAL_FUNC T simd_broadcast_first(T x, bench::site s = bench::here()) {
  bench::posts<T> p(x, BENCH_BROADCAST_FIRST, s);
  return p.at(__builtin_ctzl(p.mask));
}

struct simd_vote {
  typedef ulong vote_t;
  ulong v;
  METAL_FUNC explicit operator vote_t() const { return v; }
  METAL_FUNC bool all() const { return v == 0xffffffffull; }
  METAL_FUNC bool any() const { return v != 0; }
};
METAL_FUNC simd_vote simd_ballot(bool x, bench::site s = bench::here()) {
  ulong active;
  simd_vote r;
  r.v = bench::ballot(x, s, active);
  return r;
}
METAL_FUNC simd_vote simd_active_threads_mask(bench::site s = bench::here()) {
  ulong active;
  bench::ballot(true, s, active);
  simd_vote r;
  r.v = active;
  return r;
}
METAL_FUNC bool simd_any(bool x, bench::site s = bench::here()) { ulong active; return bench::ballot(x, s, active) != 0; }
METAL_FUNC bool simd_all(bool x, bench::site s = bench::here()) {
  ulong active;
  ulong yes = bench::ballot(x, s, active);
  return yes == active;
}
METAL_FUNC bool simd_is_first(bench::site s = bench::here()) {
  ulong active;
  bench::ballot(true, s, active);
  return uint(__builtin_ctzl(active)) == bench_lane();
}

template <typename T> METAL_FUNC T quad_sum(T x, bench::site s = bench::here()) {
  bench::posts<T> p(x, BENCH_QUAD, s);
  int q = bench_lane() & ~3u;
  return T(T(p.at(q) + p.at(q + 2)) + T(p.at(q + 1) + p.at(q + 3)));
}
template <typename T> METAL_FUNC T quad_max(T x, bench::site s = bench::here()) {
  bench::posts<T> p(x, BENCH_QUAD, s);
  int q = bench_lane() & ~3u;
  return max(max(p.at(q), p.at(q + 2)), max(p.at(q + 1), p.at(q + 3)));
}
template <typename T> METAL_FUNC T quad_shuffle_xor(T x, ushort n, bench::site s = bench::here()) {
  return bench::shuffle(x, BENCH_QUAD, s, int(bench_lane() ^ (n & 3)));
}
template <typename T> METAL_FUNC T quad_broadcast(T x, ushort n, bench::site s = bench::here()) {
  return bench::shuffle(x, BENCH_QUAD, s, int((bench_lane() & ~3u) + n));
}
}  // namespace metal
