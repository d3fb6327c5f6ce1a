"""NO_COLOR takes the colours away and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes import earlier_chats, full_pool, mixed_load, scripted
from stage import Stage, on_stage, run, screen_text
from textual.app import App

from mlxbatch.tui.top_app import TopApp


@pytest.fixture(autouse=True)
def no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def hues(app: App[None]) -> set[str]:
    """The colours on screen that are not grey."""
    styles = [segment.style for strip in app.screen._compositor.render_strips() for segment in strip]
    colours = [colour for style in styles if style for colour in (style.color, style.bgcolor) if colour]
    return {colour.name for colour in colours if colour.triplet is None or len(set(colour.triplet)) > 1}


@pytest.mark.parametrize("theme", ["mlxbatch-dark", "mlxbatch-light"])
def test_the_chat(tmp_path: Path, theme: str) -> None:
    async def visited(stage: Stage) -> None:
        assert hues(stage.app) == set()
        for key in ("f1", "f2", "ctrl+s", "ctrl+g"):
            await stage.press(key)
            assert hues(stage.app) == set()
            await stage.press("escape")

    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), prepare=earlier_chats, theme=theme) as stage:
            await visited(stage)
            mixed_load(stage.engine)
            await stage.say("And what happens on a fork?")
            await stage.play(300)
            assert "Nothing else moves" in stage.text()
            await visited(stage)

    run(scene())


def test_the_chat_in_the_terminals_own_colours(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), prepare=earlier_chats, theme="ansi-dark") as stage:
            assert "paged attention" in stage.text()
            await stage.press("ctrl+g")
            assert "KV" in stage.text()

    run(scene())


@pytest.mark.parametrize("theme", ["mlxbatch-dark", "ansi-dark"])
def test_top(theme: str) -> None:
    async def scene() -> None:
        engine = scripted()
        full_pool(engine)
        app = TopApp(engine, theme=theme, clock=lambda: engine.clock)
        async with app.run_test(size=(120, 36)) as pilot:
            for _ in range(3):
                await pilot.pause()
            assert "evals q-1" in screen_text(app)
            await pilot.press("b")  # half blocks differ by colour alone, and are drawn all the same
            await pilot.pause()

    run(scene())
