// Runs a grid: threadgroups one after the other, the threads of each as fibers of this one OS thread, so that a launch
// is deterministic. A thread runs until it waits for others; a simdgroup meets when none of its lanes can go on, the
// threadgroup when none of its simdgroups can.
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include "device.h"

static void (*entry)(const u64*);
static u64 arguments[MAX_BUFFERS];
static u64 random_state;

static u32 random_below(u32 n) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(random_state >> 33) % n;
}
static void arrange(u32* order, u32 n) {
  for (u32 i = 0; i < n; i++) order[i] = launch->schedule == 1 ? n - 1 - i : i;
  if (launch->schedule < 2) return;
  for (u32 i = n; i > 1; i--) {
    u32 j = random_below(i), swap = order[i - 1];
    order[i - 1] = order[j];
    order[j] = swap;
  }
}

static void thread_main() {
  entry(arguments);
  T->current->state = FINISHED;
  to_scheduler();
  abort();
}
static void resume(Lane* l) {
  T->current = l;
  bench_switch(&T->scheduler, l->stack_pointer);
  T->current = nullptr;
}

static void order_memory(Simdgroup& group, u32 flags) {
  if (flags & 1) group.device_step++;
  if (flags & 2) group.threadgroup_step++;
}

static Finding* find_at(Kind kind, const Lane& lane) {
  T->current = (Lane*)&lane;
  Finding* f = find(kind, 0, lane.frame, &lane.site);
  T->current = nullptr;
  return f;
}

// Lets the lanes that wait at one call site go on; false when none waits. Of several sites the first in the source
// goes first, which is where a compiler would reconverge them.
static bool meet(u32 s) {
  Simdgroup& group = T->simdgroup[s];
  Lane* lanes = T->lane + group.first;
  const Lane* first = nullptr;
  const Lane* elsewhere = nullptr;
  for (u32 i = 0; i < group.lanes; i++) {
    const Lane& l = lanes[i];
    if (l.state != IN_COLLECTIVE && l.state != IN_SIMDGROUP_BARRIER) continue;
    if (!first || l.site.place < first->site.place) {
      if (first) elsewhere = first;
      first = &l;
    } else if (!(l.site == first->site)) {
      elsewhere = &l;
    }
  }
  if (launch->count) counters[s].meet();
  if (!first) return false;
  Site site = first->site;
  State state = first->state;
  u64 active = 0;
  u32 present = 0, finished = 0;
  for (u32 i = 0; i < group.lanes; i++) {
    finished += lanes[i].state == FINISHED;
    if (lanes[i].state != state || !(lanes[i].site == site)) continue;
    active |= 1ull << i;
    present++;
  }
  bool incomplete_barrier = state == IN_SIMDGROUP_BARRIER && present + finished < group.lanes;
  if (elsewhere) report->divergent_collectives++;
  if (elsewhere || incomplete_barrier)
    if (Finding* f = find_at(DIVERGENT_COLLECTIVE, *first)) {
      f->amount = present;
      if (elsewhere) set_place(&f->other_place, elsewhere->site), f->other_thread = elsewhere->thread;
    }
  if (state == IN_SIMDGROUP_BARRIER) {
    report->simdgroup_barriers++;
    order_memory(group, first->flags);
  } else {
    report->collectives[site.op]++;
    if (present < group.lanes) report->partial_collectives++;
    Table& table = group.tables[group.table];
    table.reduced = 0;
    for (u32 i = 0; i < group.lanes; i++) {
      if (!(active >> i & 1)) continue;
      Lane& l = lanes[i];
      if (l.posted != group.table) memcpy(table.post[i], group.tables[l.posted].post[i], POST_BYTES);
      l.posted = group.table;
      l.active = active;
    }
    group.table ^= 1;
  }
  for (u32 i = 0; i < group.lanes; i++)
    if (active >> i & 1) lanes[i].state = RUNNABLE;
  return true;
}

// Lets the whole threadgroup go on from a barrier; false when all its threads have returned.
static bool meet_threadgroup() {
  u32 waiting = 0, flags = ~0u;
  const Lane* first = nullptr;
  const Lane* elsewhere = nullptr;
  for (u32 t = 0; t < T->threads; t++) {
    const Lane& l = T->lane[t];
    if (l.state != IN_THREADGROUP_BARRIER) continue;
    waiting++;
    flags &= l.flags;
    if (!first) first = &l;
    else if (!(l.site == first->site)) elsewhere = &l;
  }
  if (!waiting) return false;
  if (elsewhere || waiting < T->threads)
    if (Finding* f = find_at(DIVERGENT_BARRIER, *first)) {
      f->amount = waiting;
      f->finished = T->threads - waiting;
      if (elsewhere) set_place(&f->other_place, elsewhere->site), f->other_thread = elsewhere->thread;
    }
  report->threadgroup_barriers++;
  if (flags & 1) device_shadow.epoch++, note_epoch();
  if (flags & 2) threadgroup_shadow.epoch++;
  for (u32 s = 0; s < T->simdgroups; s++) order_memory(T->simdgroup[s], flags);
  for (u32 t = 0; t < T->threads; t++)
    if (T->lane[t].state == IN_THREADGROUP_BARRIER) T->lane[t].state = RUNNABLE;
  return true;
}

static void start_threadgroup() {
  T->threads = T->size[0] * T->size[1] * T->size[2];
  T->simdgroups = (T->threads + WIDTH - 1) / WIDTH;
  report->threadgroups++;
  report->threads += T->threads;
  device_shadow.first_epoch = ++device_shadow.epoch;
  threadgroup_shadow.first_epoch = ++threadgroup_shadow.epoch;
  note_epoch();
  for (u32 i = 0; i < T->variables; i++) {
    const Variable& v = T->variable[i];
    memset(T->memory + v.offset, 0xFF, v.size);
    if (threadgroup_atomics) memset(threadgroup_cells + v.offset, 0, v.size * sizeof(Cell));
  }
  threadgroup_atomics = false;
  for (u32 t = 0; t < T->threads; t++) {
    Lane& l = T->lane[t];
    l.thread = t;
    l.simdgroup = t / WIDTH;
    l.lane = t % WIDTH;
    l.position[0] = t % T->size[0];
    l.position[1] = t / T->size[0] % T->size[1];
    l.position[2] = t / T->size[0] / T->size[1];
    l.state = RUNNABLE;
    l.stack = T->stacks + T->stack_bytes * t;
    l.stack_pointer = new_fiber(l.stack + T->stack_bytes, thread_main);
  }
  for (u32 s = 0; s < T->simdgroups; s++) {
    Simdgroup& group = T->simdgroup[s];
    group.first = s * WIDTH;
    group.lanes = least(WIDTH, T->threads - s * WIDTH);
    group.threadgroup_step++;
    group.device_step++;
    if (launch->count) counters[s].start();
  }
}

static bool run_threadgroup() {
  start_threadgroup();
  do {
    u32 simdgroups[MAX_SIMDGROUPS], lanes[WIDTH];
    arrange(simdgroups, T->simdgroups);
    arrange(lanes, WIDTH);
    for (u32 i = 0; i < T->simdgroups; i++) {
      const Simdgroup& group = T->simdgroup[simdgroups[i]];
      do {
        for (u32 j = 0; j < WIDTH; j++) {
          if (lanes[j] >= group.lanes) continue;
          Lane& l = T->lane[group.first + lanes[j]];
          if (l.state != RUNNABLE) continue;
          resume(&l);
          if (aborting) return false;
        }
      } while (meet(simdgroups[i]));
    }
  } while (meet_threadgroup());
  return true;
}

static void check_outputs_written() {
  for (u32 i = 0; i < launch->buffers; i++) {
    const Buffer& b = launch->buffer[i];
    if (!device_cells[i] || b.initialised || b.may_be_partial) continue;
    u64 missing = 0, first = 0;
    for (u64 k = 0; k < b.size; k++)
      if (!device_cells[i][k].write_epoch && !missing++) first = k;
    if (!missing) continue;
    if (Finding* f = find(UNWRITTEN_OUTPUT, 0, 0)) f->buffer = i, f->offset = (i64)first, f->amount = (u32)missing;
  }
}

// A signal ends the process: the report is in shared memory, and worker.py starts a new one.
static void on_signal(int number, siginfo_t* info, void* context) {
  if (!T || !T->current) {
    signal(number, SIG_DFL);
    raise(number);
    return;
  }
  ucontext_t* c = (ucontext_t*)context;
#if defined(__x86_64__)
  u64 pc = (u64)c->uc_mcontext.gregs[REG_RIP], frame = (u64)c->uc_mcontext.gregs[REG_RBP];
  u64 top = (u64)c->uc_mcontext.gregs[REG_RSP];
#else
  u64 pc = c->uc_mcontext.pc, frame = c->uc_mcontext.regs[29], top = c->uc_mcontext.sp;
#endif
  u64 a = (u64)info->si_addr, stack = (u64)T->current->stack;
  Kind kind = number == SIGALRM ? TIMEOUT : number == SIGFPE ? DIVISION : WILD_POINTER;
  if (number == SIGABRT || number == SIGILL || number == SIGTRAP) kind = CRASH;
  if (number == SIGILL && launch->checked) kind = ARRAY_BOUNDS;  // clang before 20 traps behind a private array
  if (number == SIGSEGV && a < stack + 4096 && a + (1 << 20) > stack) kind = STACK_OVERFLOW;
  if (Finding* f = find(kind, 0, 0)) {
    f->offset = (i64)a;
    f->amount = (u32)number;
    u32 n = 0;
    if (in_module(pc)) f->frames[n++] = pc + 1 - module_base;  // as if it were a return address
    // Else it struck in the runtime, perhaps before a function had its frame: the kernel's return address is near.
    for (u64 a = top; !n && a >= stack && a < top + 1024 && a + 8 <= stack + T->stack_bytes; a += 8)
      if (in_module(*(u64*)a)) f->frames[n++] = *(u64*)a - module_base;
    walk(T->current, frame, f->frames, n);
  }
  report->aborted = 1;
  report->finished = 1;
  _exit(1);
}

static void prepare() {
  T = (Threads*)pages(sizeof(Threads));
  T->memory = (u8*)pages(THREADGROUP_ARENA);
  T->allocated = (u8*)pages(THREADGROUP_ARENA);
  threadgroup_cells = (Cell*)pages(THREADGROUP_ARENA * sizeof(Cell));
  stack_t signals = {};
  signals.ss_size = 1 << 16;
  signals.ss_sp = pages(signals.ss_size);
  sigaltstack(&signals, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  const int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGALRM};
  for (int number : numbers) sigaction(number, &action, nullptr);
}

extern "C" void bench_launch(void (*kernel)(const u64*), u8* memory, Launch* l, Report* r) {
  if (!T) prepare();
  launch = l;
  report = r;
  arena = memory;
  entry = kernel;
  aborting = false;
  memset(r, 0, sizeof *r);
  dl_iterate_phdr(find_module, (void*)kernel);
  random_state = l->schedule * 0x9E3779B97F4A7C15ull + 1;
  last_buffer = 0;
  if (T->stack_bytes != l->stack_bytes) {
    if (T->stacks) munmap(T->stacks, T->stack_bytes * MAX_THREADS);
    T->stack_bytes = l->stack_bytes;
    T->stacks = (u8*)pages(T->stack_bytes * MAX_THREADS);
    for (u32 i = 0; i < MAX_THREADS; i++) mprotect(T->stacks + T->stack_bytes * i, 4096, PROT_NONE);
  }
  for (u32 i = 0; i < T->variables; i++) memset(T->allocated + T->variable[i].offset, 0, T->variable[i].size);
  T->variables = T->memory_used = T->memory_top = 0;
  device_shadow = {0, 0};
  for (u32 i = 0; i < l->buffers; i++) {
    const Buffer& b = l->buffer[i];
    arguments[i] = (u64)memory + b.offset;
    device_cells[i] = l->checked && b.writable && b.size ? (Cell*)pages(b.size * sizeof(Cell)) : nullptr;
  }
  if (l->count) start_counting();
  u32 full[3], total = 1;
  for (int i = 0; i < 3; i++) {
    full[i] = least(l->threadgroup[i], l->grid[i]);
    T->groups[i] = (l->grid[i] + full[i] - 1) / full[i];
    total *= T->groups[i];
  }
  u32* order = (u32*)pages(total * sizeof(u32));
  arrange(order, total);
  bool completed = true;
  for (u32 i = 0; i < total && completed; i++) {
    T->index = order[i];
    T->position[0] = T->index % T->groups[0];
    T->position[1] = T->index / T->groups[0] % T->groups[1];
    T->position[2] = T->index / T->groups[0] / T->groups[1];
    for (int k = 0; k < 3; k++) T->size[k] = least(full[k], l->grid[k] - T->position[k] * full[k]);
    completed = run_threadgroup();
  }
  T->index = 0;
  if (completed && l->checked) check_outputs_written();
  munmap(order, total * sizeof(u32));
  if (l->count) stop_counting();
  for (u32 i = 0; i < l->buffers; i++)
    if (device_cells[i]) munmap(device_cells[i], l->buffer[i].size * sizeof(Cell));
  r->finished = 1;
}
extern "C" {
u64 bench_launch_bytes() { return sizeof(Launch); }
u64 bench_report_bytes() { return sizeof(Report); }
// Conversions that clang calls where the CPU has no instruction for them, and that an older libgcc lacks.
__attribute__((weak)) float __extendhfsf2(u16 h) {
  u32 sign = (u32)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, x;
  if (exponent == 31) x = sign | 0x7f800000 | fraction << 13;
  else if (exponent) x = sign | (exponent + 112) << 23 | fraction << 13;
  else {
    float f = (float)fraction * 5.9604644775390625e-8f;
    memcpy(&x, &f, 4);
    x |= sign;
  }
  float f;
  memcpy(&f, &x, 4);
  return f;
}
__attribute__((weak)) u16 __truncsfhf2(float f) {
  u32 x;
  memcpy(&x, &f, 4);
  u32 sign = x >> 16 & 0x8000, a = x & 0x7fffffff;
  if (a > 0x7f800000) return (u16)(sign | 0x7e00 | (a >> 13 & 0x3ff));
  if (a >= 0x477ff000) return (u16)(sign | 0x7c00);  // rounds to infinity
  if (a < 0x38800000) {                              // subnormal: let float addition round it to 2^-24
    float magnitude, unit = 0.5f;
    memcpy(&magnitude, &a, 4);
    magnitude += unit;
    memcpy(&a, &magnitude, 4);
    return (u16)(sign | (a - 0x3f000000));
  }
  return (u16)(sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13));
}
}
