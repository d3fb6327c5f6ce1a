// Fibers: every thread of a threadgroup has a stack of its own, and runs until it needs the others.
#pragma once
#include "abi.h"

extern "C" __attribute__((visibility("hidden"))) void bench_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.globl bench_switch
.hidden bench_switch
.type bench_switch,@function
bench_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size bench_switch,.-bench_switch
)");
// A stack whose first switch enters `start`, aligned as after a call.
static void* new_fiber(u8* top, void (*start)()) {
  u64* p = (u64*)((u64)top & ~15ull);
  *--p = 0;
  *--p = (u64)start;
  for (int i = 0; i < 6; i++) *--p = 0;
  return p;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl bench_switch
.hidden bench_switch
.type bench_switch,@function
bench_switch:
  sub sp, sp, #176
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #176
  ret
.size bench_switch,.-bench_switch
)");
static void* new_fiber(u8* top, void (*start)()) {
  u64* p = (u64*)(((u64)top & ~15ull) - 176);
  for (int i = 0; i < 22; i++) p[i] = 0;
  p[11] = (u64)start;
  return p;
}
#else
#error "the bench knows x86-64 and aarch64"
#endif
