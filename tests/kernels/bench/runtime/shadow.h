// Who last wrote and read each byte of threadgroup memory and of the outputs, and whether a barrier lies between.
//
// A threadgroup barrier opens a new epoch, a simdgroup barrier a new step of that simdgroup:
//     same thread                       ordered
//     another epoch, same threadgroup   ordered
//     same simdgroup, another step      ordered
//     anything else                     a race, as Apple's GPUs promise no lock step and no order between threadgroups
// Epochs never repeat within a launch, so those below `first_epoch` are other threadgroups'.
#pragma once
#include "findings.h"

struct Cell {
  u32 write_epoch, write_step, write_pc;
  u32 read_epoch, read_step, read_pc;
  u32 readers;  // simdgroups that read it in read_epoch
  u32 read_before_pc;
  u16 write_thread, read_thread, read_before_thread;
  u8 several_readers;   // lanes of the last reader's simdgroup, in its last step
  u8 read_by_another_threadgroup;
};

struct Shadow {
  u32 epoch, first_epoch;
};
static Shadow threadgroup_shadow, device_shadow;
static u32* epoch_threadgroup;  // device epoch -> threadgroup, for the reports
static u32 epochs_known;
static Cell* threadgroup_cells;
static Cell* device_cells[MAX_BUFFERS];

static const u32 ATOMIC_EPOCH = ~0u;  // written by an atomic operation: initialised, ordered with everything

static void note_epoch() {
  if (device_shadow.epoch >= epochs_known) {
    epochs_known = epochs_known ? epochs_known * 2 : 1024;
    epoch_threadgroup = (u32*)realloc(epoch_threadgroup, epochs_known * sizeof(u32));
    if (!epoch_threadgroup) abort();
  }
  epoch_threadgroup[device_shadow.epoch] = T->index;
}

struct Conflict {
  bool found;
  u32 pc, thread, epoch;
};

static Conflict conflict(const Cell& c, bool write, const Shadow& s, u32 simdgroup, u32 step, u32 thread) {
  if (c.write_epoch && c.write_epoch < s.first_epoch) return {true, c.write_pc, c.write_thread, c.write_epoch};
  if (c.write_epoch == s.epoch && c.write_thread != thread &&
      (c.write_thread / WIDTH != simdgroup || c.write_step == step))
    return {true, c.write_pc, c.write_thread, c.write_epoch};
  if (!write) return {};
  if (c.read_epoch && c.read_epoch < s.first_epoch) return {true, c.read_pc, c.read_thread, c.read_epoch};
  if (c.read_by_another_threadgroup) return {true, c.read_before_pc, c.read_before_thread, c.read_epoch};
  if (c.read_epoch != s.epoch) return {};
  bool same = c.read_thread == thread;
  u32 pc = same ? c.read_before_pc : c.read_pc, other = same ? c.read_before_thread : c.read_thread;
  if (c.readers & ~(1u << simdgroup)) return {true, pc, other, c.read_epoch};
  if (c.read_step == step && (c.several_readers || !same)) return {true, pc, other, c.read_epoch};
  return {};
}

static void remember(Cell& c, bool write, const Shadow& s, u32 simdgroup, u32 step, u32 thread, u32 pc) {
  if (write) {
    c.write_epoch = s.epoch;
    c.write_step = step;
    c.write_thread = (u16)thread;
    c.write_pc = pc;
    return;
  }
  if (c.read_epoch != s.epoch) {
    if (c.read_epoch && c.read_epoch < s.first_epoch) c.read_by_another_threadgroup = 1;
    c.readers = 0;
  }
  bool together = c.readers && c.read_thread / WIDTH == simdgroup && c.read_step == step;
  c.several_readers = together && (c.several_readers || c.read_thread != thread);
  if (c.read_thread != thread || !c.readers) {
    c.read_before_thread = c.read_thread;
    c.read_before_pc = c.read_pc;
  }
  c.read_epoch = s.epoch;
  c.read_step = step;
  c.read_thread = (u16)thread;
  c.read_pc = pc;
  c.readers |= 1u << simdgroup;
}

// Threadgroup memory starts anew with each threadgroup.
static void forget_other_threadgroups(Cell& c, const Shadow& s) {
  if (c.write_epoch < s.first_epoch) c.write_epoch = 0;
  if (c.read_epoch < s.first_epoch) c.read_epoch = c.readers = 0;
}

// One access to n bytes; reports a race at most once.
static void shadow_access(Cell* cells, u32 n, bool write, u64 pc, bool device, u32 buffer, i64 offset) {
  const Lane* lane = T->current;
  const Simdgroup& group = T->simdgroup[lane->simdgroup];
  const Shadow& s = device ? device_shadow : threadgroup_shadow;
  u32 step = device ? group.device_step : group.threadgroup_step;
  bool reported = false;
  for (u32 i = 0; i < n; i++) {
    Cell& c = cells[i];
    if (!device) forget_other_threadgroups(c, s);
    if (!reported) {
      Conflict other = conflict(c, write, s, lane->simdgroup, step, lane->thread);
      if (other.found) {
        reported = true;
        if (Finding* f = FIND(device ? DEVICE_RACE : THREADGROUP_RACE, pc)) {
          f->buffer = buffer;
          f->offset = offset + i;
          f->size = n;
          f->write = write;
          f->other_frame = other.pc;
          f->other_thread = other.thread;
          f->other_threadgroup = device ? epoch_threadgroup[other.epoch] : T->index;
          name_variable(f, (u32)(offset + i));
        }
      }
    }
    remember(c, write, s, lane->simdgroup, step, lane->thread, module_offset(pc));
  }
}
