"""What can be typed after a slash. The palette and the help screen list the same table."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mlxbatch.errors import UsageError


@dataclass(frozen=True, slots=True)
class Command:
    """`method` is the chat screen's action or the command runner's method; the latter gets the text after the
    name, stripped. `action` names the key that does the same."""

    name: str
    usage: str
    help: str
    method: str
    needs_arguments: bool = False
    action: str = ""


COMMANDS: tuple[Command, ...] = (
    Command("new", "", "open a new tab", "action_new_tab", action="new"),
    Command("close", "", "close this tab; the chat stays in the history", "command_close"),
    Command("rename", "TITLE", "give this chat a title", "command_rename", True),
    Command("system", "[TEXT]", "set the system prompt of this chat", "command_system"),
    Command("set", "NAME VALUE", "a sampling parameter, as in /set top_p 0.9", "command_set", True),
    Command("settings", "", "system prompt and sampling parameters", "action_settings", action="settings"),
    Command("model", "[NAME]", "choose the model of this chat", "command_model", action="model"),
    Command("file", "PATH ...", "put text files into the next message", "command_file", True),
    Command("editor", "", "write the message in $EDITOR", "action_editor", action="editor"),
    Command("prompts", "", "find an earlier prompt", "action_find_prompt", action="find_prompt"),
    Command("regenerate", "", "another answer, as a new version", "action_regenerate", action="regenerate"),
    Command("edit", "", "edit your last message, as a new version", "command_edit"),
    Command("branch", "", "continue from here in a new tab", "command_branch"),
    Command("stop", "", "stop the answer; what there is of it stays", "action_stop", action="stop"),
    Command("copy", "[code]", "copy the last answer, or its last code block", "command_copy"),
    Command("search", "[WORDS]", "search all chats", "command_search", action="history"),
    Command("export", "md|json [FILE]", "write this chat to a file", "command_export", True),
    Command("delete", "", "delete this chat for good", "command_delete"),
    Command("theme", "[NAME]", "change the colours", "command_theme"),
    Command("sidebar", "", "show or hide the side bar", "action_sidebar", action="sidebar"),
    Command("engine", "", "the engine screen", "command_engine", action="engine"),
    Command("help", "", "keys and commands", "command_help", action="help"),
    Command("quit", "", "leave; tabs open again next time", "command_quit", action="quit"),
)


def matching(text: str) -> list[Command]:
    """Commands that a half-typed line may become: none once arguments follow, or when it is no command."""
    if not text.startswith("/") or any(space in text for space in " \n\t"):
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:].lower())]


def parse(text: str) -> tuple[Command, str] | None:
    """The command of a line and what follows it; None for an ordinary message.

    Only a single line that starts with a slash and a word is a command, so that paths and pasted text are
    messages. Raises UsageError for a name that is not a command, and for missing arguments.
    """
    if not text.startswith("/") or "\n" in text.strip():
        return None
    name, _, arguments = text[1:].rstrip().partition(" ")
    if not name.isalpha():
        return None
    command = next((command for command in COMMANDS if command.name == name.lower()), None)
    if command is None:
        candidates = [known.name for known in COMMANDS if known.name.startswith(name.lower())]
        if len(candidates) == 1:
            command = next(known for known in COMMANDS if known.name == candidates[0])
        else:
            close = difflib.get_close_matches(name.lower(), [known.name for known in COMMANDS], n=1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
            raise UsageError(f"there is no command /{name}; {hint}")
    if command.needs_arguments and not arguments.strip():
        raise UsageError(f"write /{command.name} {command.usage}")
    return command, arguments.strip()


# How /set and the settings screen read each sampling parameter.
PARAMETERS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "max_tokens": int,
    "seed": int,
    "stop": str,
}


def read_parameter(name: str, text: str) -> object:
    """The value of a parameter as typed; None (from nothing, "default" or "none") goes back to the default.

    `stop` takes one string, in which \\n is a line break. Raises UsageError.
    """
    if name not in PARAMETERS:
        close = difflib.get_close_matches(name, list(PARAMETERS), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(PARAMETERS)}"
        raise UsageError(f"there is no sampling parameter {name!r}; {hint}")
    text = text.strip()
    if text.lower() in ("", "default", "none"):
        return None
    kind = PARAMETERS[name]
    if kind is str:
        return [text.replace("\\n", "\n").replace("\\t", "\t")]
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} must be {what}, not {text!r}") from None
