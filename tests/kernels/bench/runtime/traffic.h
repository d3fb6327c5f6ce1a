// Device traffic. Accesses of the lanes of a simdgroup at the same address of code, the same time round between two
// points where the simdgroup meets, count as one instruction of the simdgroup: its 64-byte lines are counted once.
#pragma once
#include "threads.h"

static const u32 LINE = 64;

struct Occurrences {  // how often each lane has been at `pc` since the simdgroup last met
  u32 pc, batch;
  u32 times[WIDTH];
};
struct LineKey {
  u32 pc, time, target, line;  // target: buffer * 2 + write
  u32 batch;
};

struct LineCounter {
  static const u32 PLACES = 1 << 14;
  Occurrences* occurrences;
  LineKey* keys;
  u32 capacity, used, batch;

  void start() {
    if (!occurrences) {
      occurrences = (Occurrences*)pages(sizeof(Occurrences) * PLACES);
      capacity = 1 << 12;
      keys = (LineKey*)pages(sizeof(LineKey) * capacity);
    }
    meet();
  }
  void meet() {
    used = 0;
    batch++;
  }
  u32 time_round(u32 pc, u32 lane) {
    u32 i = pc * 2654435761u % PLACES;
    while (occurrences[i].pc && occurrences[i].pc != pc) i = (i + 1) % PLACES;
    Occurrences& o = occurrences[i];
    if (o.batch != batch) {
      memset(o.times, 0, sizeof o.times);
      o.batch = batch;
    }
    o.pc = pc;
    return o.times[lane]++;
  }
  // True when this line is new to the instruction.
  bool add(u32 pc, u32 time, u32 target, u32 line) {
    if (used * 2 > capacity) grow();
    u32 i = place(pc, time, target, line);
    LineKey& k = keys[i];
    if (k.batch == batch) return false;
    k = {pc, time, target, line, batch};
    used++;
    return true;
  }

 private:
  u32 place(u32 pc, u32 time, u32 target, u32 line) const {
    u64 h = (u64)pc * 0x9E3779B97F4A7C15ull ^ (u64)time * 0xC2B2AE3D27D4EB4Full ^
            (((u64)target << 32 | line) * 0x165667B19E3779F9ull);
    u32 i = (u32)(h >> 32) & (capacity - 1);
    while (keys[i].batch == batch && !(keys[i].pc == pc && keys[i].time == time && keys[i].target == target && keys[i].line == line))
      i = (i + 1) & (capacity - 1);
    return i;
  }
  void grow() {
    LineKey* old = keys;
    u32 n = capacity;
    capacity *= 2;
    keys = (LineKey*)pages(sizeof(LineKey) * capacity);
    for (u32 i = 0; i < n; i++)
      if (old[i].batch == batch) keys[place(old[i].pc, old[i].time, old[i].target, old[i].line)] = old[i];
    munmap(old, sizeof(LineKey) * n);
  }
};
static LineCounter counters[MAX_SIMDGROUPS];

struct Touched {
  u32 *read, *written;  // per line: the last threadgroup that touched it, plus 1
  u8* bytes;            // per byte: 1 read, 2 written
};
static Touched touched[MAX_BUFFERS];

static void start_counting() {
  for (u32 i = 0; i < launch->buffers; i++) {
    u64 size = launch->buffer[i].size, lines = size / LINE + 2;
    touched[i] = {(u32*)pages(lines * 4), (u32*)pages(lines * 4), (u8*)pages(size + 1)};
  }
}
static void stop_counting() {
  for (u32 i = 0; i < launch->buffers; i++) {
    u64 size = launch->buffer[i].size, lines = size / LINE + 2;
    munmap(touched[i].read, lines * 4);
    munmap(touched[i].written, lines * 4);
    munmap(touched[i].bytes, size + 1);
  }
}

static void count_lines(u32 buffer, u64 offset, u32 n, bool write, u32 pc) {
  const Lane* lane = T->current;
  Traffic& t = report->traffic[buffer];
  LineCounter& counter = counters[lane->simdgroup];
  u32 time = counter.time_round(pc, lane->lane);
  u32* stamp = write ? touched[buffer].written : touched[buffer].read;
  for (u32 l = (u32)(offset / LINE); l <= (u32)((offset + n - 1) / LINE); l++) {
    if (counter.add(pc, time, buffer * 2 + write, l)) (write ? t.written_lines : t.read_lines)++;
    if (stamp[l] != T->index + 1) {
      stamp[l] = T->index + 1;
      (write ? t.threadgroup_written_lines : t.threadgroup_read_lines)++;
    }
  }
  u8 bit = write ? 2 : 1;
  for (u64 i = offset; i < offset + n; i++) {
    u8& flags = touched[buffer].bytes[i];
    if (flags & bit) continue;
    flags |= bit;
    (write ? t.unique_written_bytes : t.unique_read_bytes)++;
  }
}
