// What the runtime and worker.py / report.py exchange; the two sides must agree field by field.
#pragma once
#include <stdint.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

enum { MAX_BUFFERS = 32, MAX_FINDINGS = 32, MAX_FRAMES = 6, MAX_COLLECTIVES = 32, NO_BUFFER = 0xffffffff };

struct Buffer {
  u64 offset, size;  // within the arena
  u32 writable, initialised, may_be_partial, unused;
};

struct Launch {
  u32 grid[3], threadgroup[3];
  u32 buffers;
  u32 schedule;  // 0 forward, 1 backward, 2 and more: the seed of a random one
  u32 count;     // count device traffic
  u32 memory_limit;
  u32 stack_bytes;
  u32 checked;  // the kernel is instrumented
  Buffer buffer[MAX_BUFFERS];
};

// The order is that of Kind in report.py.
enum Kind : u32 {
  DEVICE_BOUNDS, THREADGROUP_BOUNDS, ARRAY_BOUNDS, WILD_POINTER, PRIVATE_ACCESS, READ_ONLY_WRITE,
  THREADGROUP_RACE, DEVICE_RACE, UNINITIALISED_THREADGROUP, UNINITIALISED_OUTPUT, UNWRITTEN_OUTPUT,
  DIVERGENT_BARRIER, DIVERGENT_COLLECTIVE, INACTIVE_LANE, THREADGROUP_MEMORY, MISALIGNED,
  INTEGER_OVERFLOW, DIVISION, FLOAT_CONVERSION, INVALID_VALUE, MISSING_RETURN, STACK_OVERFLOW, CRASH, TIMEOUT,
};

struct Place {
  char file[120];
  u32 line;
};

struct Finding {
  u32 kind;
  u32 buffer;
  i64 offset;
  u32 size, write;
  u32 thread, threadgroup, other_thread, other_threadgroup;
  u32 amount, finished;  // lanes or bytes concerned; threads that had already returned
  u64 count;
  u64 frames[MAX_FRAMES];  // return addresses in the kernel's module, innermost first, 0 after the last
  u64 other_frame;
  Place place, other_place;  // known without debug information for barriers and collectives
  char variable[64];         // of threadgroup memory
};

struct Traffic {
  u64 read_bytes, written_bytes, reads, writes;
  u64 read_lines, written_lines;                        // 64-byte lines per simdgroup instruction
  u64 threadgroup_read_lines, threadgroup_written_lines;  // distinct lines per threadgroup
  u64 unique_read_bytes, unique_written_bytes;
  u64 atomics;
};

struct Report {
  u32 findings, aborted;
  Finding finding[MAX_FINDINGS];
  Traffic traffic[MAX_BUFFERS];
  u64 threadgroup_read_bytes, threadgroup_written_bytes;
  u64 threadgroups, threads, threadgroup_barriers, simdgroup_barriers;
  u64 partial_collectives, divergent_collectives;
  u64 collectives[MAX_COLLECTIVES];
  u32 threadgroup_memory, finished;
};
