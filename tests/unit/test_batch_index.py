"""The first pass: one state a line, ids found again, and no line held longer than it takes to check it."""

import io
import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.batch import source as source_module
from mlxbatch.batch.formats import LineReader
from mlxbatch.batch.index import InputIndex, LineState, index_input
from mlxbatch.batch.item import RequestDefaults
from mlxbatch.batch.source import InputFile
from mlxbatch.errors import UsageError

B, V, X, D = LineState.BLANK, LineState.VALID, LineState.BAD, LineState.DUPLICATE


def index_of(path: Path, format: str = "messages") -> InputIndex:
    return index_input(InputFile(str(path)), LineReader(format, RequestDefaults()))  # type: ignore[arg-type]


def test_states_counts_and_problems(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(
        '{"id": "a", "prompt": "x", "n": 2}\n'
        "\n"
        '{"id": "b", "messages": [{"role": "user", "content": "x"}], "model": "m"}\n'
        "{broken\n"
        '{"id": "a", "prompt": "again"}\n'
        '{"id": "c", "prompt": 3}\n'
        '{"id": "c", "prompt": "id of a bad line"}\n'
        "   \n"
        '{"prompt": "no id"}'
    )
    index = index_of(path)
    assert list(index.states) == [B, V, B, V, X, D, X, D, B, V]
    assert (index.requests, index.valid, index.bad) == (7, 3, 4)
    assert (index.chats, index.completions, index.answers) == (1, 2, 6)
    assert [line for line, _ in index.problems] == [4, 5, 6, 7]
    assert "line 1" in str(index.problems[1][1])
    assert index.named_models == {"m": 1}
    assert [index.line_of(i) for i in ("a", "b", "c", "line-9", "d", 1)] == [1, 3, 6, 9, None, None]


def test_line_ends_bom_and_a_missing_last_newline_do_not_matter(tmp_path: Path) -> None:
    one, other = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_bytes(b"one\ntwo\n")
    other.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert list(InputFile(str(one)).lines()) == list(InputFile(str(other)).lines()) == [(1, b"one"), (2, b"two")]
    assert index_of(one, "text").sha256 == index_of(other, "text").sha256


def test_a_line_too_long_is_one_bad_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "LONGEST_LINE", 100)
    monkeypatch.setattr("mlxbatch.batch.index.LONGEST_LINE", 100)
    path = tmp_path / "in.txt"
    path.write_bytes(b"\n".join([b"x" * 100, b"y" * 101, b"z" * 5000, b"w" * 100 + b"\r", b"end"]))
    index = index_of(path, "text")
    assert list(index.states) == [B, V, X, X, V, V]
    assert index.problems[0][1].code == "line_too_long"


@given(st.lists(st.sampled_from(["a", "b", "c", "d", 1, 2, None]), max_size=30))
def test_a_duplicate_is_a_line_whose_id_came_before(ids: list[str | int | None]) -> None:
    lines = [json.dumps({"prompt": "x"} | ({} if i is None else {"id": i})) for i in ids]
    source = InputFile("-", io.BytesIO("\n".join(lines).encode()))
    index = index_input(source, LineReader("messages", RequestDefaults()))
    for number, custom_id in enumerate(ids, start=1):
        first = number if custom_id is None else ids.index(custom_id) + 1
        assert index.states[number] == (V if first == number else D)
        assert index.line_of(f"line-{number}" if custom_id is None else custom_id) == first


def test_standard_input_and_pipes_are_spooled(tmp_path: Path) -> None:
    spooled = InputFile("-", io.BytesIO(b"one\ntwo\n"))
    assert [list(spooled.lines()) for _ in range(2)] == [[(1, b"one"), (2, b"two")]] * 2
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"three\n",))
    writer.start()
    source = InputFile(str(pipe))
    writer.join()
    assert [list(source.lines()) for _ in range(2)] == [[(1, b"three")]] * 2
    assert (source.size, spooled.size) == (6, 8)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        InputFile(str(tmp_path / "nothing"))


def test_memory_grows_by_bytes_a_line_not_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for number in range(20_000):
            file.write(json.dumps({"id": number, "prompt": "word " * 100}) + "\n")
    assert path.stat().st_size > 10_000_000
    tracemalloc.start()
    index = index_of(path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.valid == 20_000
    assert held < 100 * 20_000
    assert peak < 4_000_000
