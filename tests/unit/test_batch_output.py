"""The output file: whole records only, one writer, and a resume that knows what it goes on with."""

import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.batch.formats import LineReader
from mlxbatch.batch.index import InputIndex, index_input
from mlxbatch.batch.item import RequestDefaults
from mlxbatch.batch.manifest import Manifest, manifest_path, new_manifest, read_manifest, write_manifest
from mlxbatch.batch.output import OutputOptions, open_output, read_earlier, refuse_differences
from mlxbatch.batch.recordlog import RecordLog, RecordStream, whole_lines
from mlxbatch.batch.source import InputFile
from mlxbatch.config import EngineConfig
from mlxbatch.errors import EngineError, UsageError

ANSWER_A = {"custom_id": "a", "text": "x"}
ERROR_B = {"custom_id": "b", "error": {"code": "engine_error", "message": "m", "param": None, "line": 2}}


@pytest.fixture
def index(tmp_path: Path) -> InputIndex:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": "x"}) + "\n" for i in "abc"))
    return index_input(InputFile(str(path)), LineReader("messages", RequestDefaults()))


def manifest(index: InputIndex, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "input_path": "in.jsonl",
        "index": index,
        "format": "messages",
        "config": EngineConfig(),
        "defaults": RequestDefaults(),
        "output": Path("out.jsonl"),
        "errors": None,
        "order": "completion",
    }
    return new_manifest(**values | changes)


def begun(path: Path, index: InputIndex, *records: Any, errors: Path | None = None) -> None:
    """An output as an earlier run left it."""
    output = open_output(OutputOptions(path, errors), index)
    output.begin(manifest(index, output=path, errors=errors))
    for record in records:
        (output.errors if "error" in record else output.answers).append(record)
    output.close()


def test_a_record_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "out")
    log.append({"x": "ü\n", "inf": float("-inf")})
    assert (tmp_path / "out").read_bytes() == '{"x":"ü\\n","inf":null}\n'.encode()
    log.close()


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b), max_size=4), st.binary(max_size=70_000))
def test_a_torn_last_line_is_cut_and_nothing_else(lines: list[bytes], torn: bytes) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out"
        path.write_bytes(whole + torn.replace(b"\n", b""))
        assert [text for _, text in whole_lines(path)] == [line + b"\n" for line in lines]
        log = RecordLog(path)
        log.cut_torn_line()
        log.close()
        assert path.read_bytes() == whole


def test_only_one_run_writes_to_a_file(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "out")
    with pytest.raises(UsageError, match="another run"):
        RecordLog(tmp_path / "out")
    log.append(ANSWER_A)
    log.keep_only(lambda text: True)
    with pytest.raises(UsageError, match="another run"):
        RecordLog(tmp_path / "out")  # the file that took its place is locked too
    log.close()
    RecordLog(tmp_path / "out").close()


def test_a_full_disk_is_an_engine_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RecordLog(tmp_path / "out")

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(EngineError, match="out: No space left"):
        log.append(ANSWER_A)


def test_a_stream_that_cannot_be_written_is_named() -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(EngineError, match="/dev/full: No space left"):
        RecordStream(full, "/dev/full").append(ANSWER_A)
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb", buffering=0) as pipe, pytest.raises(BrokenPipeError):
        RecordStream(pipe).append(ANSWER_A)


def test_a_short_write_to_a_stream_is_continued() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[:3])

    stream = Slow()
    RecordStream(stream).append(ANSWER_A)
    assert json.loads(stream.getvalue()) == ANSWER_A


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    log = RecordLog(tmp_path / "out")
    log.append(ANSWER_A)
    assert json.loads((tmp_path / "out").read_text()) == ANSWER_A


def test_keep_only_replaces_the_file_and_goes_on_appending(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch(mode=0o640)
    log = RecordLog(path)
    for record in (ANSWER_A, ERROR_B):
        log.append(record)
    assert log.keep_only(lambda text: b"error" not in text) == 1
    log.append(ERROR_B)
    log.close()
    assert [json.loads(text) for _, text in whole_lines(path)] == [ANSWER_A, ERROR_B]
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out"]


def test_a_failing_keep_only_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "out")
    log.append(ANSWER_A)

    def fails(text: bytes) -> bool:
        raise ValueError

    with pytest.raises(ValueError):
        log.keep_only(fails)
    assert os.listdir(tmp_path) == ["out"]
    assert json.loads((tmp_path / "out").read_text()) == ANSWER_A


def test_a_resume_finds_answers_and_errors_in_either_file(tmp_path: Path, index: InputIndex) -> None:
    for errors in (None, tmp_path / "errors.jsonl"):
        path = tmp_path / f"out-{errors is None}"
        begun(path, index, ANSWER_A, ERROR_B, errors=errors)
        earlier = read_earlier(OutputOptions(path, errors, resume=True), index)
        assert (list(earlier.done), earlier.answers, earlier.errors) == ([0, 1, 1, 0], 1, 1)
        retried = read_earlier(OutputOptions(path, errors, retry_errors=True), index)
        assert (list(retried.done), retried.answers, retried.errors) == ([0, 1, 0, 0], 1, 0)


def test_retrying_takes_the_error_records_out_and_keeps_the_answers(tmp_path: Path, index: InputIndex) -> None:
    path = tmp_path / "out"
    begun(path, index, ERROR_B, ANSWER_A)
    output = open_output(OutputOptions(path, retry_errors=True), index)
    assert len(path.read_text().splitlines()) == 2  # nothing is touched before the run begins
    output.begin(manifest(index, output=path))
    output.close()
    assert [json.loads(text) for _, text in whole_lines(path)] == [ANSWER_A]


@pytest.mark.parametrize(
    ("records", "complaint"),
    [
        ([{"custom_id": "z", "text": "x"}], "no request 'z'"),
        ([{"custom_id": None, "error": ERROR_B["error"] | {"line": 9}}], "no request"),  # type: ignore[operator]
        ([ANSWER_A, ANSWER_A], "already a record"),
        ([ERROR_B, {"custom_id": "b", "text": "x"}], "already a record"),
        ([["a"]], "not a record"),
    ],
)
def test_a_record_that_no_line_explains_is_refused(
    tmp_path: Path, index: InputIndex, records: list[Any], complaint: str
) -> None:
    begun(tmp_path / "out", index, *records)
    with pytest.raises(UsageError, match=complaint):
        read_earlier(OutputOptions(tmp_path / "out", resume=True), index)


def test_an_existing_output_is_never_taken_by_surprise(tmp_path: Path, index: InputIndex) -> None:
    path = tmp_path / "out"
    OutputOptions(path).check(None)
    begun(path, index)
    OutputOptions(path).check(None)  # a run that died before its first record is no obstacle
    begun(path, index, ANSWER_A)
    with pytest.raises(UsageError, match=r"--resume goes on .* --overwrite starts anew"):
        OutputOptions(path).check(None)
    OutputOptions(path, resume=True).check(None)
    OutputOptions(path, overwrite=True).check(None)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (OutputOptions(Path("out"), resume=True, overwrite=True), "one of them"),
        (OutputOptions(None, resume=True), "need an output file"),
        (OutputOptions(Path("/dev/null"), retry_errors=True), "need an output file"),
        (OutputOptions(Path("in.jsonl"), overwrite=True), "different files"),
        (OutputOptions(Path("out"), Path("./out")), "different files"),
    ],
)
def test_contradictions_are_refused(options: OutputOptions, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        options.check("in.jsonl")


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_no_file_of_a_run_is_another_one_of_it_under_a_second_name(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    source, other, out = (tmp_path / name for name in ("in.jsonl", "other.jsonl", "out.jsonl"))
    source.write_text("x\n")
    link(source, other)
    with pytest.raises(UsageError, match="different files"):
        OutputOptions(other, overwrite=True).check(str(source))
    for report in (other, out, manifest_path(out)):
        with pytest.raises(UsageError, match="different files"):
            OutputOptions(out).check(str(source), (None, report))
    OutputOptions(out).check(str(source), (tmp_path / "stats.json", tmp_path / "trace.json"))


def test_a_file_that_is_no_output_of_a_run_is_left_as_it_was(tmp_path: Path, index: InputIndex) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"a": 1}')
    with pytest.raises(UsageError, match="is missing"):
        open_output(OutputOptions(path, resume=True), index)
    assert path.read_text() == '{"a": 1}'


def test_overwriting_keeps_the_old_records_until_the_run_begins(tmp_path: Path, index: InputIndex) -> None:
    path = tmp_path / "out"
    begun(path, index, ANSWER_A)
    output = open_output(OutputOptions(path, overwrite=True), index)
    assert path.read_text()
    output.begin(manifest(index, output=path))
    assert not path.read_text()
    output.close()


def test_a_resume_without_its_manifest_is_refused(tmp_path: Path, index: InputIndex) -> None:
    begun(tmp_path / "out", index, ANSWER_A)
    manifest_path(tmp_path / "out").unlink()
    with pytest.raises(UsageError, match="is missing"):
        open_output(OutputOptions(tmp_path / "out", resume=True), index)
    manifest_path(tmp_path / "out").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read"):
        open_output(OutputOptions(tmp_path / "out", resume=True), index)


Change = Callable[[InputIndex], Manifest]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda i: manifest(i, config=EngineConfig(model="other")), '"smollm2-135m" and is now "other"'),
        (lambda i: manifest(i, config=EngineConfig(dtype="float16")), "dtype"),
        (lambda i: manifest(i, defaults=RequestDefaults(temperature=0.5)), "temperature was not set and is now 0.5"),
        (lambda i: manifest(i, defaults=RequestDefaults(stop=("x",))), "stop"),
        (lambda i: manifest(i, defaults=RequestDefaults(system="x")), "system"),
        (lambda i: manifest(i, order="input"), "order"),
        (lambda i: manifest(i, errors=Path("errors.jsonl")), "errors"),
    ],
)
def test_a_changed_run_is_refused_with_what_differs(index: InputIndex, change: Change, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_differences(manifest(index), change(index), Path("out"))
    assert said in str(caught.value)


def test_a_changed_input_or_model_content_is_refused(tmp_path: Path, index: InputIndex) -> None:
    old, new = manifest(index), manifest(index)
    old.model["fingerprint"], new.model["fingerprint"] = "1", "2"
    new.input["sha256"] = "0"
    assert old.differences(new) == ["the content of the input has changed", "the content of the model has changed"]
    new.model["fingerprint"] = None  # not loaded yet: nothing to compare
    assert len(old.differences(new)) == 1


def test_what_only_decides_the_speed_may_change(index: InputIndex) -> None:
    faster = EngineConfig(max_num_seqs=4, block_size=32, kv_memory=10**9, prefix_caching=False)
    refuse_differences(manifest(index), manifest(index, config=faster), Path("out"))


def test_a_manifest_names_a_file_whose_name_is_no_text(tmp_path: Path, index: InputIndex) -> None:
    named = manifest(index, input_path="/caf\udce9/\udcc3\udcbc", errors=Path("\udcff"))
    write_manifest(tmp_path / "m", named)
    assert read_manifest(tmp_path / "m").input_path == "/caf\ufffd/ü"
    assert not read_manifest(tmp_path / "m").differences(named)


def test_a_manifest_survives_its_file(tmp_path: Path, index: InputIndex) -> None:
    written = manifest(index, defaults=RequestDefaults(stop=("a", "b"), temperature=0.7))
    write_manifest(tmp_path / "m", written)
    assert read_manifest(tmp_path / "m") == written
    with pytest.raises(UsageError, match="cannot write"):
        write_manifest(tmp_path / "no" / "m", written)
