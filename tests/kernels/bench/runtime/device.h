// The services that the Metal library of shim/ calls: attributes, threadgroup memory, barriers, collectives, atomics.
#pragma once
#include "checker.h"

static u32 least(u32 a, u32 b) { return a < b ? a : b; }

extern "C" {
// The number of an attribute is its place in ATTRIBUTES of signature.py.
void bench_attribute(int id, u32* out) {
  const Lane* l = T->current;
  u32 group[3], full[3];
  for (int i = 0; i < 3; i++) full[i] = least(launch->threadgroup[i], launch->grid[i]);
  u32 dispatched = full[0] * full[1] * full[2];
  out[0] = out[1] = out[2] = 0;
  for (int i = 0; i < 3; i++) group[i] = T->position[i];
  auto three = [&](const u32* v) { for (int i = 0; i < 3; i++) out[i] = v[i]; };
  switch (id) {
    case 0: out[0] = (dispatched + 3) / 4; break;            // dispatch_quadgroups_per_threadgroup
    case 1: out[0] = (dispatched + WIDTH - 1) / WIDTH; break;  // dispatch_simdgroups_per_threadgroup
    case 2: three(full); break;                              // dispatch_threads_per_threadgroup
    case 3: break;                                           // grid_origin
    case 4: three(launch->grid); break;                      // grid_size
    case 5: out[0] = l->thread / 4; break;                   // quadgroup_index_in_threadgroup
    case 6: out[0] = (T->threads + 3) / 4; break;            // quadgroups_per_threadgroup
    case 7: out[0] = l->simdgroup; break;                    // simdgroup_index_in_threadgroup
    case 8: out[0] = T->simdgroups; break;                   // simdgroups_per_threadgroup
    case 9: out[0] = WIDTH; break;                           // thread_execution_width
    case 10: out[0] = l->thread % 4; break;                  // thread_index_in_quadgroup
    case 11: out[0] = l->lane; break;                        // thread_index_in_simdgroup
    case 12: out[0] = l->thread; break;                      // thread_index_in_threadgroup
    case 13: for (int i = 0; i < 3; i++) out[i] = group[i] * full[i] + l->position[i]; break;  // thread_position_in_grid
    case 14: three(l->position); break;                      // thread_position_in_threadgroup
    case 15: three(group); break;                            // threadgroup_position_in_grid
    case 16: three(T->groups); break;                        // threadgroups_per_grid
    case 17: three(launch->grid); break;                     // threads_per_grid
    case 18: out[0] = WIDTH; break;                          // threads_per_simdgroup
    case 19: three(T->size); break;                          // threads_per_threadgroup
  }
}

// The same variable for every thread of the threadgroup, poisoned when a threadgroup starts.
void* bench_threadgroup_variable(u32 size, u32 align, const char* file, u32 line, const char* name, u32 key) {
  for (u32 i = 0; i < T->variables; i++) {
    const Variable& v = T->variable[i];
    if (v.key == key && v.line == line && v.size == size && v.file == file) return T->memory + v.offset;
  }
  Site site = {file, line << 12, 0};
  u32 step = align < 16 ? 16 : align;
  u32 offset = (T->memory_top + 64 + step - 1) & ~(step - 1);
  const u32 MOST_VARIABLES = 31;  // Metal's "threadgroup locations"
  bool full = T->variables == sizeof T->variable / sizeof *T->variable || offset + (u64)size + 4096 > THREADGROUP_ARENA;
  T->memory_used += (size + 15) & ~15u;
  if (T->memory_used > report->threadgroup_memory) report->threadgroup_memory = T->memory_used;
  if (full || T->memory_used > launch->memory_limit || T->variables == MOST_VARIABLES)
    if (Finding* f = find(THREADGROUP_MEMORY, CALLER, (u64)__builtin_frame_address(0), &site)) {
      f->amount = T->memory_used;
      f->size = T->variables + 1;
      strncpy(f->variable, name, sizeof f->variable - 1);
    }
  if (full) give_up();
  T->memory_top = offset + size;
  T->variable[T->variables++] = {offset, size, line, key, file, name};
  memset(T->allocated + offset, 1, size);
  memset(T->memory + offset, 0xFF, size);
  return T->memory + offset;
}

static void wait(State state, u32 flags, const char* file, u32 place, u32 op) {
  Lane* l = T->current;
  l->state = state;
  l->flags = flags;
  l->site = {file, place, op};
  l->frame = (u64)__builtin_frame_address(0);
  to_scheduler();
}
void bench_threadgroup_barrier(u32 flags, const char* file, u32 place) { wait(IN_THREADGROUP_BARRIER, flags, file, place, 0); }
void bench_simdgroup_barrier(u32 flags, const char* file, u32 place) { wait(IN_SIMDGROUP_BARRIER, flags, file, place, 0); }

void* bench_exchange(const void* post, u32 size, u32 op, const char* file, u32 place, u64* active) {
  Lane* l = T->current;
  Simdgroup& group = T->simdgroup[l->simdgroup];
  l->posted = group.table;
  memcpy(group.tables[l->posted].post[l->lane], post, size);
  wait(IN_COLLECTIVE, 0, file, place, op);
  *active = l->active;
  return &group.tables[l->posted];
}
u32 bench_lane() { return T->current->lane; }
void bench_inactive_lane(const char* file, u32 place) {
  Site site = {file, place, 0};
  find(INACTIVE_LANE, CALLER, (u64)__builtin_frame_address(0), &site);
}

static bool threadgroup_atomics;  // this threadgroup has used some
void bench_atomic(const volatile void* p, u32 n, u32 writes) {
  u64 a = (u64)p;
  Cell* cells = nullptr;
  if (in_threadgroup_memory(a)) {
    u32 offset = (u32)(a - (u64)T->memory);
    if (!T->allocated[offset] || !T->allocated[offset + n - 1]) return threadgroup_access(a, n, writes, CALLER);
    cells = threadgroup_cells + offset;
    threadgroup_atomics = true;
  } else {
    int b = buffer_of(a, n);
    if (b < 0) return out_of_bounds(a, n, writes, CALLER);
    report->traffic[b].atomics++;
    if (device_cells[b]) cells = device_cells[b] + (a - (u64)arena - launch->buffer[b].offset);
  }
  for (u32 i = 0; writes && cells && i < n; i++)
    if (!cells[i].write_epoch) cells[i].write_epoch = ATOMIC_EPOCH;
}
}
