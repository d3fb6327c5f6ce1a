// The Metal language on top of clang's "C++ for OpenCL 2021": address spaces, key words, limits, and the
// services of the runtime (runtime/device.h).
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define __METAL__ 1
#define __METAL_VERSION__ 320
#define __METAL_MACOS__ 1
#define __HAVE_BFLOAT__ 1
#define __METAL_MAYBE_FAST_MATH__ false
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define kernel
#define METAL_FUNC inline __attribute__((__always_inline__))
#define METAL_CONST

// OpenCL key words and types that a Metal program may use as plain identifiers.
#define global msl_global
#define local msl_local
#define generic msl_generic
#define pipe msl_pipe
#define atomic_int msl_atomic_int
#define atomic_uint msl_atomic_uint
#define atomic_float msl_atomic_float
#define atomic_long msl_atomic_long
#define atomic_ulong msl_atomic_ulong
#define atomic_flag msl_atomic_flag
#define event_t msl_event_t
#define queue_t msl_queue_t
#define memory_scope msl_memory_scope

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef long intptr_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
struct bfloat;

namespace bench {
// Where the kernel's source calls a barrier or a collective; also the identity of that call.
struct site {
  const __constant char* file;
  uint place;  // line * 4096 + column
};
constexpr site here(const __constant char* file = __builtin_FILE(), uint line = __builtin_LINE(),
                    uint column = __builtin_COLUMN()) {
  return {file, line * 4096 + column};
}
}  // namespace bench

// What a collective is called in the counters; the order is that of COLLECTIVES in report.py.
enum bench_collective : uint {
  BENCH_SUM, BENCH_PRODUCT, BENCH_MAX, BENCH_MIN, BENCH_AND, BENCH_OR, BENCH_XOR,
  BENCH_SHUFFLE, BENCH_SHUFFLE_XOR, BENCH_SHUFFLE_UP, BENCH_SHUFFLE_DOWN, BENCH_SHUFFLE_FILL_UP,
  BENCH_SHUFFLE_FILL_DOWN, BENCH_SHUFFLE_ROTATE, BENCH_BROADCAST, BENCH_BROADCAST_FIRST, BENCH_BALLOT,
  BENCH_PREFIX_INCLUSIVE_SUM, BENCH_PREFIX_EXCLUSIVE_SUM, BENCH_PREFIX_INCLUSIVE_PRODUCT,
  BENCH_PREFIX_EXCLUSIVE_PRODUCT, BENCH_QUAD, BENCH_MATRIX_MULTIPLY,
};

extern "C" {
void bench_attribute(int id, uint* out);
void* bench_threadgroup_variable(uint size, uint align, const __constant char* file, uint line,
                                 const __constant char* name, uint key);
__attribute__((convergent)) void bench_threadgroup_barrier(uint flags, const __constant char* file, uint place);
__attribute__((convergent)) void bench_simdgroup_barrier(uint flags, const __constant char* file, uint place);
__attribute__((convergent)) void* bench_exchange(const void* post, uint size, uint op,
                                                 const __constant char* file, uint place, __private ulong* active);
uint bench_lane();
void bench_inactive_lane(const __constant char* file, uint place);
void bench_atomic(const volatile void* address, uint size, uint writes);
}

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_inff())
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define MAXHALF 65504.0h
#define HALF_MAX 65504.0h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define UCHAR_MAX 255
#define CHAR_MAX 127
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.434294481903251827651f
#define M_LN2_F 0.693147180559945309417f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.785398163397448309616f
#define M_1_PI_F 0.318309886183790671538f
#define M_2_PI_F 0.636619772367581343076f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
