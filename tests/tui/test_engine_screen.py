"""What a user does on the engine screen, in the chat and as mlxbatch top."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scenes import evals, full_pool, mixed_load, scripted
from stage import Stage, on_stage, run, screen_text

from mlxbatch.engine.snapshot import ClientInfo, ModelFacts, Snapshot
from mlxbatch.errors import EngineError
from mlxbatch.process.status import LinkStatus
from mlxbatch.tui.chat.tab_bar import TabLabel, run_labels, tab_bar_line
from mlxbatch.tui.engine.screen import EngineScreen
from mlxbatch.tui.top_app import TopApp


def rows(stage: Stage) -> list[str]:
    """Names in the batch panel, from top to bottom."""
    lines = stage.text().splitlines()[4:12]
    return [line[5:20].strip() for line in lines if line[5:20].strip() not in ("", "·")]


def test_rows_are_followed_by_number_arrows_and_click(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            mixed_load(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            await stage.press("2")
            assert "▶ slot 2 · run1/q-171 · run (pid 777) · batch" in stage.line(2)
            await stage.press("2")
            assert "▶ slot" not in stage.text()
            await stage.press("down", "down")
            assert "▶ slot 2" in stage.line(2)
            await stage.press("up")
            assert "▶ slot 1" in stage.line(2)
            await stage.pilot.click("#engine-view", offset=(10, 6))
            await stage.settle()
            assert "▶ slot 3" in stage.line(2)

    run(scene())


def test_rows_are_sorted(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            mixed_load(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            assert rows(stage)[0] == "block tables"
            await stage.press("s", "s", "s")  # by blocks
            blocks = {slot.label: slot.blocks for slot in stage.engine.snapshot().slots}
            names = [name.removeprefix("run:evals ").removeprefix("chat ") for name in rows(stage)]
            assert [blocks[name] for name in names] == sorted(blocks.values(), reverse=True)

    run(scene())


def test_a_frozen_picture_stays_and_says_so(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            mixed_load(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g", "space")
            before = stage.text().splitlines()[2:]
            await stage.play(40)
            assert stage.text().splitlines()[2:] == before
            assert "‖ frozen" in stage.line(1)
            await stage.press("space")
            assert stage.text().splitlines()[2:] != before
            assert "frozen" not in stage.text()

    run(scene())


def test_cancel_asks_before_it_ends_anothers_request(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            await stage.say("mine")
            evals(stage.engine, 1, 1)
            await stage.play(20)
            await stage.press("ctrl+g")
            await stage.press("2", "x")
            assert "Cancel its request run1/q-1?" in stage.text()
            await stage.press("n")
            assert len(stage.engine.running) == 2
            await stage.press("x")
            await stage.press("y")
            assert [sequence.client for sequence in stage.engine.running] == ["me"]
            await stage.press("2", "1", "x")  # our own goes at once
            assert not stage.engine.running
            assert stage.workspace.active.tree.path()[-1].status == "stopped"

    run(scene())


def test_enter_opens_the_tab_of_a_followed_answer(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            for name in ("alpha", "beta"):
                await stage.say(name)
                await stage.press("ctrl+n")
            await stage.play(3)
            await stage.press("ctrl+g")
            await stage.press("2")
            await stage.press("enter")
            assert not isinstance(stage.app.screen, EngineScreen)
            assert stage.workspace.active.title == "beta"

    run(scene())


def test_the_numbers_on_the_screen_are_the_engines_own(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(blocks=313)) as stage:
            full_pool(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            snapshot, text = stage.engine.snapshot(), stage.text()
            (pool,) = snapshot.pools
            assert f"KV blocks {pool.in_use} of {pool.total_blocks - 1} in use" in text
            assert f"{pool.shared} shared · {pool.own} own · {pool.cached} cached · {pool.free} free" in text
            drawn = "".join(line[2:74] for line in text.splitlines()[14:22])
            assert drawn.count("░") == pool.cached
            assert sum(drawn.count(mark) for mark in "12345678") == pool.own
            assert drawn.count("◆") == pool.shared
            assert f"tails {snapshot.tails.tokens} of" in text
            assert f"done {snapshot.counters.requests_finished} · steps {snapshot.counters.steps}" in text
            assert f"waiting {snapshot.waiting_count}" in text
            assert snapshot.head_reason in text

    run(scene())


def test_counters_are_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            mixed_load(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g", "m")
            await stage.settle()
            (written,) = tmp_path.glob("mlxbatch-stats-*.json")
            assert json.loads(written.read_text()) == await stage.engine.stats()

    run(scene())


def test_half_blocks_show_twice_as_much(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            mixed_load(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            assert "1 cell = 2 blocks" in stage.text()
            await stage.press("b")
            assert "1 cell = 1 block " in stage.text()
            assert "▀" in stage.text()

    run(scene())


def test_a_stale_snapshot_is_dropped(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path) as stage:
            old = stage.engine.snapshot()
            stage.engine.clock += 1
            await stage.play(1)
            newest = stage.workspace.active_engine.snapshot
            stage.engine.tell(old)
            await stage.settle()
            assert stage.workspace.active_engine.snapshot is newest

    run(scene())


def test_only_lines_that_changed_are_drawn_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            mixed_load(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            view = stage.app.screen.query_one("#engine-view")
            before = list(view._strips)
            stage.engine.show()
            await stage.settle()
            assert all(new is old for new, old in zip(view._strips, before, strict=True))
            await stage.play(1)
            kept = sum(new is old for new, old in zip(view._strips, before, strict=True))
            assert 0 < kept < len(before)

    run(scene())


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (100, 30), (200, 60), (40, 10)])
def test_any_size_is_drawn(tmp_path: Path, size: tuple[int, int]) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(slots=24), size=size) as stage:
            full_pool(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            assert any(word in stage.text() for word in ("BOUND", "THRASHING"))

    run(scene())


def test_top_shows_an_engine_and_leaves_it_alone() -> None:
    async def scene() -> None:
        engine = scripted()
        mixed_load(engine)
        app = TopApp(engine, clock=lambda: engine.clock)
        async with app.run_test(size=(120, 36)) as pilot:
            for _ in range(3):
                await pilot.pause()
            text = screen_text(app)
            assert "DECODE-BOUND" in text or "PREFILL-BOUND" in text
            assert "evals q-171" in text
            engine.tell(LinkStatus("lost", "the engine was stopped"))
            for _ in range(3):
                await pilot.pause()
            assert "NO ENGINE" in screen_text(app)
            await pilot.press("escape")
        assert app.return_code == 0
        assert len(engine.running) == 6

    run(scene())


def test_top_says_when_there_is_no_engine() -> None:
    async def scene() -> None:
        engine = scripted()

        async def start() -> None:
            raise EngineError("no engine runs for this model")

        engine.start = start  # type: ignore[method-assign]
        app = TopApp(engine)
        async with app.run_test() as pilot:
            await pilot.pause()
        assert app.return_code == 3

    run(scene())


def test_a_run_beside_the_tabs_opens_the_engine_screen(tmp_path: Path) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            await stage.settle()
            bar = stage.line(0)
            assert "run:evals 41%" in bar
            assert await stage.pilot.click("#tab-bar", offset=(bar.index("evals"), 0))
            await stage.settle()
            assert "ENGINE" in stage.line(0) and "run:evals 41%" in stage.line(0)

    run(scene())


def test_runs_take_a_third_of_the_tab_bar_at_most() -> None:
    clients = [
        ClientInfo(client_id="a", kind="run", title="run:evals", done=1, total=3),
        ClientInfo(client_id="b", kind="chat", title="chat", done=1, total=3),
        ClientInfo(client_id="c", kind="run", title="run:a very long name\x1b[2J of a run"),
        ClientInfo(client_id="", title="left behind", connected=False),
    ]
    snapshot = Snapshot(model=ModelFacts(name="m"), clients=tuple(clients))
    labels = run_labels(snapshot)
    assert labels[0] == "run:evals 33%"
    assert len(labels) == 2 and labels[1].startswith("run:a very long") and "\x1b" not in labels[1]
    assert run_labels(snapshot, compact=True) == ["run 33%", "run"]
    assert run_labels(None) == []
    tabs = [TabLabel("one", "idle")]
    assert tab_bar_line(tabs, 0, 120, labels).line.text == f"  1 one   {labels[0]}  {labels[1]}  + "
    assert tab_bar_line(tabs, 0, 75, labels).line.text == "  1 one   run:evals 33%  +1 run  + "
    assert tab_bar_line(tabs, 0, 36, labels).line.text == "  1 one   +2 runs  + "
    assert tab_bar_line(tabs, 0, 20, labels).line.text == "  1 one   + "
