"""The structures that runtime/abi.h exchanges, field by field."""

from __future__ import annotations

import ctypes as C

MAX_BUFFERS, MAX_FINDINGS, MAX_FRAMES, MAX_COLLECTIVES = 32, 32, 6, 32
NO_BUFFER = 0xFFFFFFFF

_LAUNCH = "buffers schedule count memory_limit stack_bytes checked"
_FINDING = "size write thread threadgroup other_thread other_threadgroup amount finished"
_TRAFFIC = (
    "read_bytes written_bytes reads writes read_lines written_lines threadgroup_read_lines "
    "threadgroup_written_lines unique_read_bytes unique_written_bytes atomics"
)
_TOTALS = (
    "threadgroup_read_bytes threadgroup_written_bytes threadgroups threads threadgroup_barriers "
    "simdgroup_barriers partial_collectives divergent_collectives"
)


class Buffer(C.Structure):
    _fields_ = [
        ("offset", C.c_uint64),
        ("size", C.c_uint64),
        ("writable", C.c_uint32),
        ("initialised", C.c_uint32),
        ("may_be_partial", C.c_uint32),
        ("unused", C.c_uint32),
    ]


class Launch(C.Structure):
    _fields_ = [
        ("grid", C.c_uint32 * 3),
        ("threadgroup", C.c_uint32 * 3),
        *((name, C.c_uint32) for name in _LAUNCH.split()),
        ("buffer", Buffer * MAX_BUFFERS),
    ]


class Place(C.Structure):
    _fields_ = [("file", C.c_char * 120), ("line", C.c_uint32)]


class Finding(C.Structure):
    _fields_ = [
        ("kind", C.c_uint32),
        ("buffer", C.c_uint32),
        ("offset", C.c_int64),
        *((name, C.c_uint32) for name in _FINDING.split()),
        ("count", C.c_uint64),
        ("frames", C.c_uint64 * MAX_FRAMES),
        ("other_frame", C.c_uint64),
        ("place", Place),
        ("other_place", Place),
        ("variable", C.c_char * 64),
    ]


class Traffic(C.Structure):
    _fields_ = [(name, C.c_uint64) for name in _TRAFFIC.split()]


class Report(C.Structure):
    _fields_ = [
        ("findings", C.c_uint32),
        ("aborted", C.c_uint32),
        ("finding", Finding * MAX_FINDINGS),
        ("traffic", Traffic * MAX_BUFFERS),
        *((name, C.c_uint64) for name in _TOTALS.split()),
        ("collectives", C.c_uint64 * MAX_COLLECTIVES),
        ("threadgroup_memory", C.c_uint32),
        ("finished", C.c_uint32),
    ]
