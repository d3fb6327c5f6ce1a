"""GGUF files that are damaged, cut short, or made to do harm: a clear error, in bounded memory and time."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxbatch.errors import ModelError
from mlxbatch.models import load
from mlxbatch.models.gguf_config import build_config
from mlxbatch.models.gguf_file import read_gguf
from mlxbatch.models.gguf_tokenizer import build_tokenizer
from mlxbatch.models.gguf_weights import plan_storage

HUGE = 1 << 62


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str = "t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(tensors: int, keys: int, body: bytes = b"", version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + body


NESTED = struct.pack("<IQ", 9, 1) * 1000

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "not gguf": (b"PK\x03\x04" + bytes(100), "does not start with GGUF"),
    "only magic": (b"GGUF", "ends within the version"),
    "old version": (header(0, 0, version=1), "version 1 is not supported"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648 is not supported"),
    "absurd tensor count": (header(HUGE, 0), "claims 4611686018427387904 tensors"),
    "absurd key count": (header(0, HUGE), "claims 0 tensors and 4611686018427387904 metadata keys"),
    "many tensors, no bytes": (header(100_000, 0), "ends within a tensor name"),
    "long key": (header(0, 1, struct.pack("<Q", HUGE)), "claims 4611686018427387904 bytes for a metadata key"),
    "long string": (header(0, 1, text("k") + struct.pack("<IQ", 8, HUGE)), "ends within k"),
    "many strings": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 8, HUGE)), "strings for k"),
    "many numbers": (header(0, 1, text("k") + struct.pack("<IIQ", 9, 10, HUGE)), "ends within k"),
    "nested arrays": (header(0, 1, text("k") + struct.pack("<I", 9) + NESTED), "an array of unknown type 9"),
    "unknown value": (header(0, 1, text("k") + struct.pack("<I", 77)), "an unknown value type 77"),
    "no dimensions": (header(1, 0, tensor(shape=())), "0 dimensions"),
    "too many dimensions": (header(1, 0, text("t") + struct.pack("<I", 1 << 31)), "2147483648 dimensions"),
    "zero size": (header(1, 0, tensor(shape=(0, 4))), r"the shape \(4, 0\)"),
    "product overflows": (header(1, 0, tensor(shape=(HUGE, HUGE))), "ends before tensor t does"),
    "offset beyond the end": (header(1, 0, tensor(offset=HUGE) + bytes(256)), "ends before tensor t does"),
    "unknown type": (header(1, 0, tensor(kind=999)), "unknown quantisation type 999"),
    "broken block": (header(1, 0, tensor(shape=(33,), kind=2)), "which Q4_0 cannot hold"),
    "twice": (header(2, 0, tensor() * 2 + bytes(512)), "holds tensor t twice"),
    "overlap": (header(2, 0, tensor("a") + tensor("b", offset=64) + bytes(512)), "a and b overlap"),
    "odd alignment": (
        header(1, 1, text("general.alignment") + struct.pack("<II", 4, 0) + tensor() + bytes(512)),
        "has the alignment 0",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.gguf"):
        load(str(tmp_path / "nothing.gguf"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    config = tiny_gguf.config_of("llama", num_hidden_layers=1)
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    return tiny_gguf.write(path, "llama", tiny_gguf.build(config), config).read_bytes()


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.2, 0.6, 0.999])
def test_a_file_cut_short_is_refused(share: float, sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound[: max(1, int(len(sound) * share))])
    with pytest.raises(ModelError, match=r"ends|has room for|start with GGUF"):
        load(str(path))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_headers_never_raise_anything_else(
    sound: bytes, tmp_path: Path, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(sound)
    for at, value in damage:
        data[at % len(data)] = value
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    try:
        file = read_gguf(path)
        build_config(file)
        build_tokenizer(file)
        plan_storage(file, 16)
    except ModelError:
        pass


LIES: dict[str, tuple[str, object, str]] = {
    "layers": ("llama.block_count", 4000, "speaks of 4000 layers"),
    "no layers": ("llama.block_count", 0, "block_count is 0, not 1 to"),
    "width": ("llama.embedding_length", 1 << 40, "embedding_length is 1099511627776, not 1 to"),
    "heads": ("llama.attention.head_count", 3, "do not make 3 heads|of another shape|make"),
    "wrong kind": ("llama.attention.head_count", [4, 4], "head_count is .4, 4., which is not supported"),
    "not finite": ("llama.rope.freq_base", float("nan"), "freq_base is missing or not a finite number"),
    "missing": ("llama.context_length", None, "context_length is missing"),
    "token types": ("tokenizer.ggml.token_type", [1, 2], "512 tokens, but 2 token types"),
    "merges": ("tokenizer.ggml.merges", ["nospace"], "'nospace' is not a BPE merge"),
    "foreign merges": ("tokenizer.ggml.merges", ["xyz abc"], "the merges do not fit the vocabulary"),
    "tokens": ("tokenizer.ggml.tokens", [1, 2, 3], "tokens is missing or not a list of strings"),
    "template": ("tokenizer.chat_template", 7, "chat_template is 7, which is not supported"),
}


@pytest.mark.parametrize("name", LIES)
def test_metadata_that_lies_is_refused(
    name: str, sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, value, message = LIES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    change: Callable[[dict[str, object]], object] = (
        (lambda metadata: metadata.pop(key)) if value is None else (lambda metadata: metadata.update({key: value}))
    )
    file = read_gguf(path)
    change(file.metadata)
    monkeypatch.setattr("mlxbatch.models.gguf_model.read_gguf", lambda path: file)
    with pytest.raises(ModelError, match=message):
        load(str(path))
