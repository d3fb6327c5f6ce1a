"""Helpers of these tests lie beside them; frames are compared in UTC."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-frames", action="store_true", help="write tests/tui/frames/*.txt anew instead of comparing them"
    )


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    os.environ.pop("TZ", None)
    time.tzset()


@pytest.fixture
def frame(request: pytest.FixtureRequest):
    """Compare a screen with its file, exactly."""
    folder = Path(__file__).parent / "frames"

    def compare(name: str, text: str) -> None:
        path = folder / f"{name}.txt"
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        if request.config.getoption("--update-frames", default=False):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing; see tests/tui/README.md"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; see tests/tui/README.md"

    return compare
