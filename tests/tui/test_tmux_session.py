"""The session in a real terminal, with the real engine and SmolLM2. The screens are those of tmux_session.py."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from tmux_session import play


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_session_in_a_terminal() -> None:
    kept: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mlxbatch-") as folder:
        play(Path(folder), kept.__setitem__)
    assert len(kept) == 7
