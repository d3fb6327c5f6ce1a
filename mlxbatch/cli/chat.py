"""`mlxbatch chat`: the chat application, or one answer on standard output."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxbatch.cli.engine import add_process_flags, launch_options
from mlxbatch.errors import UsageError
from mlxbatch.settings import (
    Setting,
    Sources,
    add_engine_flags,
    engine_config,
    integer,
    json_object,
    number,
    text,
)

if TYPE_CHECKING:
    from mlxbatch.history.records import Attachment

DESCRIPTION = """\
Talk to a model in the terminal, in as many tabs as you like: they answer at the same time, and share
one engine with every other chat and batch run of the model. What is said is kept; tabs open again."""

EPILOG = """\
examples:
  mlxbatch chat
  mlxbatch chat notes.txt -m qwen3-4b        notes.txt goes with the first message
  echo "Why is the sky blue?" | mlxbatch chat -p -
  git diff | mlxbatch chat - -p "Review this change." > review.md"""

SAMPLING_SETTINGS = (
    Setting("temperature", number, "0 is greedy (default: 0.7)", "T"),
    Setting("top_p", number, "sample from the likeliest tokens that make up this probability (default: 0.95)", "P"),
    Setting("top_k", integer, "sample from the K likeliest tokens", "K"),
    Setting("min_p", number, "drop tokens below this share of the likeliest one's probability", "P"),
    Setting("repetition_penalty", number, "above 1 makes repetition less likely", "R"),
    Setting("max_tokens", integer, "most new tokens of an answer (default: what fits the context)", "N"),
    Setting("seed", integer, "makes sampling repeatable", "N"),
)
CHAT_SETTINGS = (
    Setting("system", text, "system prompt of new chats", "TEXT"),
    Setting("theme", text, "auto (default), mlxbatch-dark, mlxbatch-light, ansi-dark, ansi-light, ...", "NAME"),
    Setting("history", text, "file of the conversations (default: in the user's data folder)", "FILE"),
)
KEYMAP = Setting("keymap", json_object, "keys by action, in config.toml under [chat.keymap]")

NO_TERMINAL = """\
mlxbatch chat needs a terminal. In a script or a pipe use
  echo "question" | mlxbatch chat -p -        for one answer on standard output
  mlxbatch run -i FILE -o FILE                for many requests in one batch"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="text files for the first message; - is standard input"
    )
    parser.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        help="print one answer without its thinking and exit; - reads the question from standard input",
    )
    parser.add_argument("--new", action="store_true", help="begin with a new tab beside those of last time")
    for setting in CHAT_SETTINGS:
        setting.add_to(parser)
    sampling = parser.add_argument_group("sampling in new chats")
    for setting in SAMPLING_SETTINGS:
        setting.add_to(sampling)
    add_engine_flags(parser)
    add_process_flags(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks of internal errors")


def run(args: argparse.Namespace) -> int:
    from mlxbatch.tui.chat.attachments import read_attachment

    sources = Sources.load()
    chosen = sources.resolve(args, (*SAMPLING_SETTINGS, *CHAT_SETTINGS, KEYMAP), "chat")
    sampling = {setting.name: chosen[setting.name] for setting in SAMPLING_SETTINGS if setting.name in chosen}
    if args.files.count("-") + (args.prompt == "-") > 1:
        raise UsageError("standard input can be read once: as a file (-) or as the question (-p -)")
    attachments = [_from_stdin() if name == "-" else read_attachment(name) for name in args.files]
    if args.prompt is not None:
        return _answer_once(args, sources, chosen, sampling, attachments)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(NO_TERMINAL)
    return _open_chat(args, sources, chosen, sampling, attachments)


def _from_stdin() -> Attachment:
    from mlxbatch.history.records import Attachment

    return Attachment("standard input", _read_stdin())


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        raise UsageError("standard input is not UTF-8 text") from None


def _question(prompt: str) -> str:
    try:
        return os.fsencode(prompt).decode()  # whatever the locale
    except UnicodeError:
        raise UsageError("-p: the question is not UTF-8 text") from None


def _answer_once(
    args: argparse.Namespace,
    sources: Sources,
    chosen: dict[str, Any],
    sampling: dict[str, object],
    attachments: list[Attachment],
) -> int:
    from mlxbatch.request import SamplingParams
    from mlxbatch.tui.chat.session import CHAT_DEFAULTS
    from mlxbatch.tui.one_shot import ask
    from mlxbatch.tui.open_engine import link_factory

    prompt = _read_stdin().strip() if args.prompt == "-" else _question(args.prompt)
    if not prompt and not attachments:
        raise UsageError("there is no question: give it as -p TEXT, or on standard input with -p -")
    config = engine_config(args, sources)
    params = SamplingParams(**{**CHAT_DEFAULTS, **sampling})  # type: ignore[arg-type]
    link = link_factory(config, launch_options(args, sources))(config.model)
    ask(
        link,
        prompt,
        attachments,
        params,
        system_prompt=chosen.get("system", ""),
        tell=_teller(),
    )
    return 0


def _teller() -> Any:
    """Says on standard error what the engine is doing, when somebody is there to read it."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"mlxbatch: {text}", file=sys.stderr)


def _open_chat(
    args: argparse.Namespace,
    sources: Sources,
    chosen: dict[str, Any],
    sampling: dict[str, object],
    attachments: list[Attachment],
) -> int:
    from mlxbatch.history.store import HistoryStore
    from mlxbatch.tui.app import ChatApp
    from mlxbatch.tui.chat.workspace import Workspace
    from mlxbatch.tui.keymap import Keymap
    from mlxbatch.tui.open_engine import Machine, link_factory
    from mlxbatch.tui.terminal_background import terminal_is_light
    from mlxbatch.tui.themes import AUTO, choose_theme

    config = engine_config(args, sources)
    keymap = Keymap(chosen.get("keymap"))
    wanted = chosen.get("theme", AUTO)
    theme = choose_theme(wanted, light=terminal_is_light() if wanted == AUTO else None)
    named = chosen.get("history")
    store = HistoryStore(Path(named).expanduser() if named else None)
    workspace = Workspace(
        store,
        link_factory(config, launch_options(args, sources)),
        config.model,
        system_prompt=chosen.get("system", ""),
        sampling=sampling,
    )
    workspace.restore(fresh=args.new or bool(attachments) or args.model is not None)
    app = ChatApp(workspace, keymap=keymap, theme=theme, host=Machine(), attachments=attachments)
    app.run()
    return app.return_code or 0
