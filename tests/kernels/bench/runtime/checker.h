// Every memory access of an instrumented kernel comes through here: clang's ThreadSanitizer pass calls
// __tsan_readN and __tsan_writeN before each one. Only the pass is used; these are our functions, and the
// sanitizer's own runtime is not linked. The same holds for UndefinedBehaviorSanitizer's handlers below.
#pragma once
#include "shadow.h"
#include "traffic.h"

static u32 last_buffer;

static int buffer_of(u64 a, u64 n) {
  u64 offset = a - (u64)arena;
  const Buffer& last = launch->buffer[last_buffer];
  if (last_buffer < launch->buffers && offset >= last.offset && offset + n <= last.offset + last.size) return (int)last_buffer;
  for (u32 i = 0; i < launch->buffers; i++) {
    const Buffer& b = launch->buffer[i];
    if (offset >= b.offset && offset + n <= b.offset + b.size) return (int)(last_buffer = i);
  }
  return -1;
}

// Outside of everything: near a buffer it is an index error, else a wild pointer. A read close to a buffer goes on,
// with poison as its value; what would hit unmapped memory or destroy something ends the launch.
static void out_of_bounds(u64 a, u32 n, bool write, u64 pc) {
  const u64 NEAR = 1 << 20, POISONED = 4096;
  u32 best = 0;
  u64 distance = ~0ull;
  for (u32 i = 0; i < launch->buffers; i++) {
    u64 low = (u64)arena + launch->buffer[i].offset, high = low + launch->buffer[i].size;
    u64 d = a < low ? low - a : a + n > high ? a + n - high : 0;
    if (d < distance) distance = d, best = i;
  }
  bool near = distance < NEAR;
  if (Finding* f = FIND(near ? DEVICE_BOUNDS : WILD_POINTER, pc)) {
    f->size = n;
    f->write = write;
    f->buffer = near ? best : (u32)NO_BUFFER;
    f->offset = near ? (i64)(a - (u64)arena - launch->buffer[best].offset) : (i64)a;
  }
  if (write || distance + n > POISONED) give_up();
}

static void threadgroup_access(u64 a, u32 n, bool write, u64 pc) {
  u32 offset = (u32)(a - (u64)T->memory);
  (write ? report->threadgroup_written_bytes : report->threadgroup_read_bytes) += n;
  Kind kind;
  u32 i = 0;
  while (i < n && T->allocated[offset + i]) i++;
  if (i < n) {
    kind = THREADGROUP_BOUNDS;
  } else {
    i = 0;
    if (!write)
      while (i < n && threadgroup_cells[offset + i].write_epoch >= threadgroup_shadow.first_epoch) i++;
    if (write || i == n) return shadow_access(threadgroup_cells + offset, n, write, pc, false, NO_BUFFER, offset);
    kind = UNINITIALISED_THREADGROUP;
  }
  if (Finding* f = FIND(kind, pc)) {
    f->size = n;
    f->write = write;
    f->offset = offset;
    name_variable(f, offset);
  }
  if (kind == UNINITIALISED_THREADGROUP)
    shadow_access(threadgroup_cells + offset, n, write, pc, false, NO_BUFFER, offset);
}

static void access(u64 a, u32 n, bool write, u64 pc) {
  Lane* lane = T->current;
  if (!lane || a - (u64)lane->stack < T->stack_bytes) return;
  if (in_threadgroup_memory(a)) return threadgroup_access(a, n, write, pc);
  int b = buffer_of(a, n);
  if (b >= 0) {
    const Buffer& buffer = launch->buffer[b];
    u64 offset = a - (u64)arena - buffer.offset;
    Traffic& t = report->traffic[b];
    (write ? t.written_bytes : t.read_bytes) += n;
    (write ? t.writes : t.reads)++;
    if (launch->count) count_lines((u32)b, offset, n, write, module_offset(pc));
    if (write && !buffer.writable) {
      if (Finding* f = FIND(READ_ONLY_WRITE, pc)) f->buffer = (u32)b, f->offset = (i64)offset, f->size = n, f->write = 1;
    }
    Cell* cells = device_cells[b];
    if (!cells) return;
    if (!write && !buffer.initialised)
      for (u32 i = 0; i < n; i++)
        if (!cells[offset + i].write_epoch) {
          if (Finding* f = FIND(UNINITIALISED_OUTPUT, pc)) f->buffer = (u32)b, f->offset = (i64)offset, f->size = n;
          break;
        }
    return shadow_access(cells + offset, n, write, pc, true, (u32)b, (i64)offset);
  }
  if (in_module(a)) {
    if (write)
      if (Finding* f = FIND(READ_ONLY_WRITE, pc)) f->size = n, f->write = 1;
    return;
  }
  if (a - (u64)T->stacks < T->stack_bytes * MAX_THREADS) {
    if (Finding* f = FIND(PRIVATE_ACCESS, pc)) {
      f->size = n;
      f->write = write;
      f->other_thread = (u32)((a - (u64)T->stacks) / T->stack_bytes);
      f->other_threadgroup = T->index;
    }
    return;
  }
  out_of_bounds(a, n, write, pc);
}

// A scalar or vector is aligned to its size; a memcpy of that size is taken for one.
static void check_alignment(u64 a, u64 n, u64 pc) {
  if (!(a & (n - 1)) || (n & (n - 1)) || n > 16) return;
  Lane* lane = T->current;
  if (!lane || a - (u64)lane->stack < T->stack_bytes) return;
  int b = buffer_of(a, n);
  if (b < 0 && !in_threadgroup_memory(a)) return;
  if (Finding* f = FIND(MISALIGNED, pc)) {
    f->buffer = b < 0 ? (u32)NO_BUFFER : (u32)b;
    f->offset = b < 0 ? (i64)(a - (u64)T->memory) : (i64)(a - (u64)arena - launch->buffer[b].offset);
    f->size = (u32)n;
    name_variable(f, (u32)(a - (u64)T->memory));
  }
}

extern "C" {
// The forms without "unaligned" are for accesses that the compiler was told are aligned.
#define INSTRUMENTED(n)                                                                       \
  void __tsan_read##n(void* p) { check_alignment((u64)p, n, CALLER); access((u64)p, n, false, CALLER); } \
  void __tsan_write##n(void* p) { check_alignment((u64)p, n, CALLER); access((u64)p, n, true, CALLER); } \
  void __tsan_unaligned_read##n(void* p) { access((u64)p, n, false, CALLER); }                \
  void __tsan_unaligned_write##n(void* p) { access((u64)p, n, true, CALLER); }                \
  void __tsan_volatile_read##n(void* p) { access((u64)p, n, false, CALLER); }                 \
  void __tsan_volatile_write##n(void* p) { access((u64)p, n, true, CALLER); }                 \
  void __tsan_read_write##n(void* p) { access((u64)p, n, false, CALLER); access((u64)p, n, true, CALLER); } \
  void __tsan_unaligned_read_write##n(void* p) { access((u64)p, n, false, CALLER); access((u64)p, n, true, CALLER); }
INSTRUMENTED(1) INSTRUMENTED(2) INSTRUMENTED(4) INSTRUMENTED(8) INSTRUMENTED(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  if (n) {
    check_alignment((u64)from, n, CALLER);
    check_alignment((u64)to, n, CALLER);
    access((u64)from, (u32)n, false, CALLER);
    access((u64)to, (u32)n, true, CALLER);
  }
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  if (n) access((u64)from, (u32)n, false, CALLER), access((u64)to, (u32)n, true, CALLER);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  if (n) access((u64)to, (u32)n, true, CALLER);
  return memset(to, value, n);
}
}

struct SourceLocation {  // what the sanitizer passes as its first argument starts with this
  const char* file;
  u32 line, column;
};
static void undefined(const SourceLocation* l, Kind kind, u64 pc) {
  if (!T->current) return;
  Site site = {l ? l->file : nullptr, l ? l->line << 12 : 0, 0};
  find(kind, pc, (u64)__builtin_frame_address(0), l ? &site : nullptr);
}
extern "C" {
#define UNDEFINED(name, kind, ...)                                                                          \
  void __ubsan_handle_##name(SourceLocation* l, ##__VA_ARGS__) { undefined(l, kind, CALLER); }              \
  void __ubsan_handle_##name##_abort(SourceLocation* l, ##__VA_ARGS__) { undefined(l, kind, CALLER); give_up(); }
UNDEFINED(add_overflow, INTEGER_OVERFLOW, u64, u64)
UNDEFINED(sub_overflow, INTEGER_OVERFLOW, u64, u64)
UNDEFINED(mul_overflow, INTEGER_OVERFLOW, u64, u64)
UNDEFINED(negate_overflow, INTEGER_OVERFLOW, u64)
UNDEFINED(divrem_overflow, DIVISION, u64, u64)
UNDEFINED(out_of_bounds, ARRAY_BOUNDS, u64)
UNDEFINED(load_invalid_value, INVALID_VALUE, u64)
UNDEFINED(float_cast_overflow, FLOAT_CONVERSION, u64)
void __ubsan_handle_local_out_of_bounds() { undefined(nullptr, ARRAY_BOUNDS, CALLER); }
void __ubsan_handle_builtin_unreachable(SourceLocation* l) { undefined(l, MISSING_RETURN, CALLER); give_up(); }
void __ubsan_handle_missing_return(SourceLocation* l) { undefined(l, MISSING_RETURN, CALLER); give_up(); }
}
