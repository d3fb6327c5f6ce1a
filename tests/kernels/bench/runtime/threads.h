// The threads of the threadgroup that runs now, and the memory that belongs to it.
#pragma once
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fiber.h"

static const u32 WIDTH = 32, MAX_THREADS = 1024, MAX_SIMDGROUPS = MAX_THREADS / WIDTH, POST_BYTES = 64;
static const u64 THREADGROUP_ARENA = 1 << 20;  // far more than the 32 KB limit: gaps between the variables

// Zeroed pages that cost nothing until touched.
static void* pages(u64 bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) abort();
  return p;
}

enum State : u32 { RUNNABLE, IN_COLLECTIVE, IN_SIMDGROUP_BARRIER, IN_THREADGROUP_BARRIER, FINISHED };

// A call of a barrier or collective in the source: the same for all lanes that reach it together.
struct Site {
  const char* file;
  u32 place;  // line * 4096 + column
  u32 op;
  bool operator==(const Site& o) const { return file == o.file && place == o.place && op == o.op; }
};

// Mirrors bench::table in shim/simd.h.
struct Table {
  u8 post[WIDTH][POST_BYTES];
  u32 reduced;
  u8 result[POST_BYTES];
};

struct Lane {
  void* stack_pointer;
  u8* stack;
  u32 thread, simdgroup, lane, position[3];
  State state;
  Site site;
  u32 flags;       // memory flags of the barrier it waits at
  u32 posted;      // the table its post is in
  u64 active;      // result of the collective: the lanes that took part
  u64 frame;       // of the runtime's function it waits in
};

// Lanes read a collective's posts after they are resumed, when others may already post for the next one. All
// lanes that took part have run to their next stop before another collective resolves, so two tables suffice.
struct Simdgroup {
  u32 first, lanes;
  u32 threadgroup_step, device_step;  // count the barriers that order its own memory accesses
  u32 table;
  Table tables[2];
};

struct Variable {
  u32 offset, size, line, key;
  const char* file;
  const char* name;
};

struct Threads {
  Lane lane[MAX_THREADS];
  Simdgroup simdgroup[MAX_SIMDGROUPS];
  u32 threads, simdgroups;
  u32 index, position[3], size[3];  // of the threadgroup
  u32 groups[3];
  Lane* current;
  void* scheduler;
  u8* stacks;
  u64 stack_bytes;

  u8* memory;      // threadgroup memory
  u8* allocated;   // per byte
  Variable variable[256];
  u32 variables, memory_top, memory_used;
};

static Threads* T;
static Launch* launch;
static Report* report;
static u8* arena;
static u64 module_base, module_end;  // where the kernel's library is loaded
static bool aborting;

static const Variable* variable_at(u32 offset) {
  const Variable* found = nullptr;
  for (u32 i = 0; i < T->variables; i++)
    if (T->variable[i].offset <= offset) found = &T->variable[i];
  return found;
}
static bool in_threadgroup_memory(u64 a) { return a - (u64)T->memory < THREADGROUP_ARENA; }
static void to_scheduler() {
  Lane* me = T->current;
  bench_switch(&me->stack_pointer, T->scheduler);
}
static void give_up() {
  aborting = true;
  report->aborted = 1;
  if (T->current) to_scheduler();
}
