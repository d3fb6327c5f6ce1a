"""Reading the header of a GGUF file, with every count and offset checked before it is believed.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).

    magic version tensor_count kv_count | key type value ... | name dims shape type offset ... | pad | data

A hostile file can claim 2^63 strings. Nothing is allocated before the claim is compared with the bytes
that the file still has, so memory and time are bounded by the size of the header. (`gguf.GGUFReader`
makes numpy views of every token, which takes seconds, and believes every count.)
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxbatch.errors import ModelError

_MAX_TENSORS = 1 << 17
_MAX_KEYS = 1 << 16
_MAX_KEY_BYTES = 1 << 16
_MAX_DIMS = 4
_MAX_PARTS = 1000
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` is in row-major order (rows first), `offset` counts from the start of `path`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one model, in one file or split over several. `read` gives one tensor at a time."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def paths(self) -> list[Path]:
        return sorted({self.path, *(tensor.path for tensor in self.tensors.values())})

    def read(self, tensor: GgufTensor) -> np.ndarray:
        """The raw bytes of a tensor, as uint8. Raises ModelError if the file ends early."""
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            raw = np.fromfile(file, dtype=np.uint8, count=tensor.nbytes)
        if raw.nbytes != tensor.nbytes:
            raise _broken(tensor.path, f"ends within tensor {tensor.name}")
        return raw


def read_gguf(path: Path) -> GgufFile:
    """Read and check a header, and those of the other parts if the model is split.

    Raises ModelError, naming the file and what is wrong with it.
    """
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    tensors: dict[str, GgufTensor] = {}
    for part in split_paths(path, count):
        found = first if part == path else _read_one(part)
        if twice := tensors.keys() & found.tensors.keys():
            raise _broken(part, f"repeats tensors of another part, such as {min(twice)}")
        tensors |= found.tensors
    return GgufFile(path, first.metadata, tensors)


def split_paths(path: Path, count: int) -> list[Path]:
    """All parts of a split model, from the path of its first: NAME-00001-of-0000N.gguf."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > _MAX_PARTS:
        raise ModelError(f"{path} is one of {count} parts, but its name is not NAME-00001-of-{count:05}.gguf")
    if int(match[2]) != 1:
        raise ModelError(f"{path} is a later part of a split model; name the first one instead")
    parts = [path.with_name(f"{match[1]}-{part:05}-of-{match[3]}.gguf") for part in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{part} is missing: it is one of the {count} parts of {path.name}")
    return parts


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _Reader(path, view).read()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:  # mmap refuses an empty file
        raise _broken(path, "is empty") from None


def _broken(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is not a sound GGUF file: it {what}. Fetch it again, or use another copy.")


class _Reader:
    """A cursor over the mapped header."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path = path
        self.view = view
        self.size = len(view)
        self.at = 0

    def fail(self, what: str) -> ModelError:
        return _broken(self.path, what)

    def take(self, nbytes: int, what: str) -> int:
        """Move past `nbytes`, and return where they start."""
        start = self.at
        if nbytes > self.size - start:
            raise self.fail(f"ends within {what} (needs {nbytes} bytes at {start}, has {self.size - start})")
        self.at = start + nbytes
        return start

    def number(self, code: str, what: str) -> int:
        return int(struct.unpack_from(code, self.view, self.take(struct.calcsize(code), what))[0])

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", what)
        if limit is not None and length > limit:
            raise self.fail(f"claims {length} bytes for {what}")
        start = self.take(length, what)
        return self.view[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.fail(f"has an unknown value type {kind} for {what}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.view, dtype, 1, self.take(dtype.itemsize, what))[0].item()

    def array(self, what: str) -> Any:
        kind = self.number("<I", what)
        count = self.number("<Q", what)
        if kind == _STRING:
            if count > (self.size - self.at) // 8:  # a string takes 8 bytes at least
                raise self.fail(f"claims {count} strings for {what}, more than the file has room for")
            return [self.text(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.fail(f"has an array of unknown type {kind} for {what}")
        dtype = np.dtype(_SCALARS[kind])
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.view, dtype, count, start).tolist()

    def tensor(self) -> GgufTensor:
        name = self.text("a tensor name", _MAX_KEY_BYTES)
        dims = self.number("<I", name)
        if not 1 <= dims <= _MAX_DIMS:
            raise self.fail(f"gives tensor {name} {dims} dimensions")
        shape = tuple(self.number("<Q", name) for _ in range(dims))[::-1]
        type_id = self.number("<I", name)
        offset = self.number("<Q", name)
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name} has the unknown quantisation type {type_id}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        if elements <= 0 or shape[-1] % block:
            raise self.fail(f"gives tensor {name} the shape {shape}, which {kind.name} cannot hold")
        return GgufTensor(name, shape, kind, self.path, offset, elements // block * block_bytes)

    def read(self) -> GgufFile:
        if self.view[:4] != b"GGUF":
            raise self.fail("does not start with GGUF")
        self.at = 4
        version = self.number("<I", "the version")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (2 and 3 are)")
        tensor_count = self.number("<Q", "the tensor count")
        key_count = self.number("<Q", "the metadata count")
        if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
            raise self.fail(f"claims {tensor_count} tensors and {key_count} metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.text("a metadata key", _MAX_KEY_BYTES)
            metadata[key] = self.value(self.number("<I", key), key)
        found = [self.tensor() for _ in range(tensor_count)]
        return GgufFile(self.path, metadata, self.place(found, metadata.get("general.alignment", 32)))

    def place(self, found: list[GgufTensor], alignment: Any) -> dict[str, GgufTensor]:
        """Turn offsets into the data section into offsets into the file, and check that all of it is there."""
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self.fail(f"has the alignment {alignment!r}")
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for t in found:
            if t.name in tensors:
                raise self.fail(f"holds tensor {t.name} twice")
            if start + t.offset + t.nbytes > self.size:
                raise self.fail(
                    f"ends before tensor {t.name} does "
                    f"(byte {start + t.offset + t.nbytes} of {self.size}: truncated, or a download cut short)"
                )
            tensors[t.name] = GgufTensor(t.name, t.shape, t.type, self.path, start + t.offset, t.nbytes)
        # Overlapping tensors would let a small file claim terabytes of weights.
        ordered = sorted(tensors.values(), key=lambda t: t.offset)
        for before, after in itertools.pairwise(ordered):
            if before.offset + before.nbytes > after.offset:
                raise self.fail(f"lets tensors {before.name} and {after.name} overlap")
        return tensors
