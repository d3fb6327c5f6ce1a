// Findings: one per kind and call site, with the frames of the kernel that led there.
#pragma once
#include <link.h>

#include "threads.h"

#define CALLER ((u64)__builtin_return_address(0))

static int find_module(dl_phdr_info* info, size_t, void* address) {
  u64 end = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    u64 segment_end = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz;
    if (info->dlpi_phdr[i].p_type == PT_LOAD && segment_end > end) end = segment_end;
  }
  if ((u64)address < info->dlpi_addr || (u64)address >= end) return 0;
  module_base = info->dlpi_addr;
  module_end = end;
  return 1;
}
static bool in_module(u64 address) { return address >= module_base && address < module_end; }
static u32 module_offset(u64 address) { return (u32)(address - module_base); }

// Return addresses up the chain of frame pointers, those in the kernel's module only.
static void walk(const Lane* lane, u64 frame, u64* frames, u32 n = 0) {
  u64 low = (u64)lane->stack, high = low + T->stack_bytes - 16;
  while (n < MAX_FRAMES && frame >= low && frame <= high) {
    u64 address = ((u64*)frame)[1], next = ((u64*)frame)[0];
    if (in_module(address)) frames[n++] = address - module_base;
    if (next <= frame) break;
    frame = next;
  }
  while (n < MAX_FRAMES) frames[n++] = 0;
}

static void set_place(Place* to, const Site& site) {
  strncpy(to->file, site.file ? site.file : "", sizeof to->file - 1);
  to->line = site.place >> 12;
}

// A new finding, or nullptr when the same one is known already (then it is counted).
static Finding* find(Kind kind, u64 pc, u64 frame, const Site* site = nullptr) {
  Finding made;
  memset(&made, 0, sizeof made);
  made.kind = kind;
  made.buffer = NO_BUFFER;
  made.count = 1;
  if (site) set_place(&made.place, *site);
  if (T->current) {
    made.thread = T->current->thread;
    if (frame) walk(T->current, frame, made.frames);
  }
  if (!made.frames[0] && pc) made.frames[0] = pc - module_base;
  made.threadgroup = T->index;
  for (u32 i = 0; i < report->findings; i++) {
    Finding& f = report->finding[i];
    if (f.kind != kind || f.place.line != made.place.line || strcmp(f.place.file, made.place.file)) continue;
    if (!site && memcmp(f.frames, made.frames, sizeof f.frames)) continue;
    f.count++;
    return nullptr;
  }
  if (report->findings == MAX_FINDINGS) return nullptr;
  Finding* f = &report->finding[report->findings++];
  *f = made;
  return f;
}
// For an offset in threadgroup memory: the variable it is in or behind, and the offset within that.
static void name_variable(Finding* f, u32 offset) {
  if (f->buffer != NO_BUFFER) return;
  if (const Variable* v = variable_at(offset)) {
    strncpy(f->variable, v->name, sizeof f->variable - 1);
    f->offset -= v->offset;
  }
}
#define FIND(kind, pc) find(kind, pc, (u64)__builtin_frame_address(0))
