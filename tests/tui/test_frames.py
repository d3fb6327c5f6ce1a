"""Whole screens, compared as text. README.md says how to write them anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes import earlier_chats, full_pool, mixed_load, scripted, thrash
from stage import NARROW, WIDE, Stage, on_stage, run

from mlxbatch.errors import RequestError

SIZES = [pytest.param(WIDE, id="120x36"), pytest.param(NARROW, id="80x24")]


def size_name(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


@pytest.mark.parametrize("size", SIZES)
def test_chat_idle(tmp_path: Path, frame, size) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, size=size) as stage:
            frame(f"chat_idle_{size_name(size)}", stage.text())

    run(scene())


@pytest.mark.parametrize("size", SIZES)
def test_chat_streaming(tmp_path: Path, frame, size) -> None:
    """An answer streams after folded thinking, another tab has finished, a batch run shares the engine."""

    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), size=size, prepare=earlier_chats) as stage:
            await stage.press("ctrl+n")
            await stage.say("Write a haiku about blocks.")
            await stage.press("ctrl+pageup")
            stage.engine.add("q-171", prompt_tokens=900, label="q-171")
            await stage.play(6)
            await stage.say("And what happens on a fork?")
            await stage.play(3)
            stage.engine.add("q-172", prompt_tokens=1_900, label="q-172")
            await stage.play(58)
            await stage.type("compare with copy-on-write in fork(2) please,\nand show the refcounts")
            frame(f"chat_streaming_{size_name(size)}", stage.text())

    run(scene())


@pytest.mark.parametrize("size", SIZES)
def test_chat_search(tmp_path: Path, frame, size) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, size=size, prepare=earlier_chats) as stage:
            await stage.press("ctrl+s")
            await stage.press(*"copy")
            frame(f"chat_search_{size_name(size)}", stage.text())

    run(scene())


@pytest.mark.parametrize("size", SIZES)
def test_chat_help(tmp_path: Path, frame, size) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, size=size, prepare=earlier_chats) as stage:
            await stage.press("f1")
            frame(f"chat_help_{size_name(size)}", stage.text())

    run(scene())


@pytest.mark.parametrize("size", SIZES)
def test_chat_error(tmp_path: Path, frame, size) -> None:
    """A refused request stays in the conversation, with the reason and a way on."""

    async def scene() -> None:
        async with on_stage(tmp_path, size=size) as stage:
            stage.engine.refusal = RequestError(
                "prompt of 1,200 tokens and max_tokens 40,000 need 41,200 tokens, and the model's context holds "
                "32,768. Lower max_tokens to 31,568 or leave it out.",
                code="context_length_exceeded",
            )
            await stage.say("Tell me everything.")
            frame(f"chat_error_{size_name(size)}", stage.text())

    run(scene())


def test_chat_messages(tmp_path: Path, frame) -> None:
    """A message in focus shows its keys and its versions."""

    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            await stage.press("up")
            frame("chat_messages_120x36", stage.text())

    run(scene())


def test_chat_settings(tmp_path: Path, frame) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, prepare=earlier_chats) as stage:
            await stage.press("f2")
            frame("chat_settings_120x36", stage.text())

    run(scene())


def test_chat_commands(tmp_path: Path, frame) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, size=NARROW) as stage:
            await stage.type("/s")
            frame("chat_commands_80x24", stage.text())

    run(scene())


async def engine_screen(stage: Stage) -> str:
    await stage.press("ctrl+g")
    return stage.text()


@pytest.mark.parametrize("size", SIZES)
def test_engine_idle(tmp_path: Path, frame, size) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), size=size) as stage:
            frame(f"engine_idle_{size_name(size)}", await engine_screen(stage))

    run(scene())


@pytest.mark.parametrize("size", SIZES)
def test_engine_mixed(tmp_path: Path, frame, size) -> None:
    """Prefill beside decode; our own answer is named after its tab."""

    async def scene() -> None:
        async with on_stage(tmp_path, scripted(), size=size, prepare=earlier_chats) as stage:
            await stage.say("And what happens on a fork?")
            mixed_load(stage.engine)
            await stage.settle()
            frame(f"engine_mixed_{size_name(size)}", await engine_screen(stage))

    run(scene())


@pytest.mark.parametrize("size", SIZES)
def test_engine_full(tmp_path: Path, frame, size) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(blocks=313), size=size) as stage:
            full_pool(stage.engine)
            await stage.settle()
            frame(f"engine_full_{size_name(size)}", await engine_screen(stage))

    run(scene())


@pytest.mark.parametrize("size", SIZES)
def test_engine_preemption(tmp_path: Path, frame, size) -> None:
    async def scene() -> None:
        async with on_stage(tmp_path, scripted(blocks=121, slots=6), size=size) as stage:
            thrash(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            frame(f"engine_preemption_{size_name(size)}", stage.text())

    run(scene())


def test_engine_follow(tmp_path: Path, frame) -> None:
    """A followed row: its details, its cells alone in the map, its events."""

    async def scene() -> None:
        async with on_stage(tmp_path, scripted()) as stage:
            mixed_load(stage.engine)
            await stage.settle()
            await stage.press("ctrl+g")
            await stage.press("3")
            frame("engine_follow_120x36", stage.text())

    run(scene())
