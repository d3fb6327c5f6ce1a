"""Keys, commands, themes and thinking: small tables and parsers."""

from __future__ import annotations

import pytest
from textual.keys import Keys

from mlxbatch.errors import UsageError
from mlxbatch.models.tags import detect_tags
from mlxbatch.process.answer_format import AnswerFormat
from mlxbatch.tui.chat.command_runner import CommandRunner
from mlxbatch.tui.chat.commands import COMMANDS, matching, parse, read_parameter
from mlxbatch.tui.chat.prompt_recall import PromptRecall
from mlxbatch.tui.chat.screen import ChatScreen
from mlxbatch.tui.chat.thoughts import Thoughts
from mlxbatch.tui.keymap import ACTIONS, Keymap, key_symbol
from mlxbatch.tui.terminal_background import is_light_answer
from mlxbatch.tui.themes import choose_theme


def test_no_action_takes_a_key_that_terminals_or_editing_need() -> None:
    reserved = {"ctrl+i", "ctrl+m", "ctrl+left_square_bracket", "ctrl+left", "ctrl+right", "ctrl+up", "ctrl+down"}
    reserved |= {"ctrl+a", "ctrl+e", "ctrl+k", "ctrl+u", "ctrl+w"}
    for action in ACTIONS:
        assert not reserved & set(action.keys.split(",")), action.id
    known = {key.value for key in Keys} | set("abcdefghijklmnopqrstuvwxyz")
    for action in ACTIONS:
        for key in action.keys.split(","):
            assert key in known or key.rpartition("+")[2] in known | {"enter", "space"}, key
    assert len({action.id for action in ACTIONS}) == len(ACTIONS)


def test_keymap_mistakes_are_explained() -> None:
    with pytest.raises(UsageError, match="no action 'regenrate'; did you mean 'regenerate'"):
        Keymap({"regenrate": "f5"})
    with pytest.raises(UsageError, match="engine must be keys like"):
        Keymap({"engine": 5})
    keymap = Keymap({"engine": "f5,ctrl+y"})
    assert keymap.label("engine") == "F5"
    assert keymap.label("engine", every=True) == "F5 ⌃Y"
    assert keymap.label("new") == "⌃N"
    assert [key_symbol(key) for key in ("escape", "alt+up", "shift+enter", "y")] == ["Esc", "⌥↑", "⇧⏎", "y"]


def test_every_command_has_its_method() -> None:
    for command in COMMANDS:
        owner = ChatScreen if command.method.startswith("action_") else CommandRunner
        assert callable(getattr(owner, command.method)), command.name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", None),
        ("/etc/passwd is a file", None),
        ("/ a slash", None),
        ("/new\nsecond line", None),
        ("/new", ("new", "")),
        ("/NEW ", ("new", "")),
        ("/rena  My  title ", ("rename", "My  title")),
        ("/set temperature 1", ("set", "temperature 1")),
    ],
)
def test_commands_are_told_from_messages(text: str, expected: tuple[str, str] | None) -> None:
    parsed = parse(text)
    assert (parsed and (parsed[0].name, parsed[1])) == expected


def test_a_command_without_its_arguments_says_how_to_write_it() -> None:
    with pytest.raises(UsageError, match=r"write /file PATH \.\.\."):
        parse("/file")


def test_commands_are_listed_while_their_name_is_typed() -> None:
    assert [command.name for command in matching("/se")] == ["set", "settings", "search"]
    assert matching("/set t") == matching("x/se") == matching("/zzz") == []
    assert len(matching("/")) == len(COMMANDS)


def test_parameters() -> None:
    assert read_parameter("temperature", "0.5") == 0.5
    assert read_parameter("max_tokens", " 12 ") == 12
    assert read_parameter("stop", "a\\nb") == ["a\nb"]
    assert read_parameter("seed", "default") is None
    with pytest.raises(UsageError, match="did you mean top_p"):
        read_parameter("topp", "1")


def test_recall_comes_back_to_what_was_typed() -> None:
    recall = PromptRecall(lambda: ["newest", "older"])
    assert recall.step(-1, "typed") == "newest"
    assert recall.step(-1, "newest") == "older"
    assert recall.step(-1, "older") is None
    assert recall.step(1, "older") == "newest"
    assert recall.step(1, "newest") == "typed"
    assert recall.step(1, "typed") is None
    assert recall.step(-1, "typed") == "newest"
    assert recall.step(-1, "newest, changed") == "newest"  # a changed prompt is what is being typed now
    assert recall.step(1, "newest") == "newest, changed"


@pytest.mark.parametrize(
    ("environ", "light", "theme"),
    [
        ({"TERM": "xterm-256color"}, None, "mlxbatch-dark"),
        ({"TERM": "xterm-256color"}, True, "mlxbatch-light"),
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, None, "mlxbatch-light"),
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, False, "mlxbatch-dark"),
        ({"TERM": "xterm"}, None, "ansi-dark"),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, None, "mlxbatch-dark"),
        ({"TERM": "linux"}, True, "ansi-light"),
    ],
)
def test_the_theme_follows_the_terminal(environ: dict[str, str], light: bool | None, theme: str) -> None:
    assert choose_theme("auto", environ, light=light) == theme
    assert choose_theme("nord", environ, light=light) == "nord"


def test_answers_to_the_question_about_the_background() -> None:
    assert is_light_answer(b"\x1b]11;rgb:ffff/ffff/f8f8\x07\x1b[?62;4c") is True
    assert is_light_answer(b"\x1b]11;rgb:1e1e/1e1e/2e2e\x1b\\\x1b[?62c") is False
    assert is_light_answer(b"\x1b]11;rgba:ff/ff/ff/ff\x07") is True
    assert is_light_answer(b"\x1b[?62;4c") is None


def test_thinking_is_told_from_answer_across_any_cut() -> None:
    text = "<think>\nhm, 1 < 2\n</think>\n\nYes."
    for cut in range(len(text)):
        thoughts = Thoughts(AnswerFormat(tags=detect_tags("<think>")))
        parts = [thoughts.feed(text[:cut]), thoughts.feed(text[cut:]), thoughts.close()]
        assert "".join(thinking for thinking, _ in parts).strip() == "hm, 1 < 2"
        assert "".join(answer for _, answer in parts) == "Yes."


def test_a_prompt_that_opens_the_thinking_counts() -> None:
    thoughts = Thoughts(AnswerFormat(tags=detect_tags("<think>"), opening="<|im_start|>assistant\n<think>\n"))
    assert thoughts.feed("hm</think>Yes")[0] == "hm"
