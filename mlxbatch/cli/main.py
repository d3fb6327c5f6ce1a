"""The `mlxbatch` command. Each subcommand is a module of this package, imported only when it is called."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO, cast

from mlxbatch import __version__
from mlxbatch.errors import MlxbatchError, UsageError

# The help lines stand here, so that `mlxbatch --help` imports no subcommand.
COMMANDS = {
    "run": "answer every request of a JSONL or text file",
    "chat": "talk to a model in the terminal, in as many tabs as you like",
    "models": "list, pull, show and remove models",
    "engine": "status, logs and stop of the engine that chats and runs share",
    "top": "watch a running engine: rows, KV blocks, queue, rates",
    "plan": "what fits this Mac: weights, KV per token, rows by context",
    "tune": "measure this machine and model, and choose how many rows to run",
    "simulate": "try policies and loads on a simulated Mac",
    "bench": "measure throughput and latency",
    "doctor": "check the machine, MLX and the kernels",
}

INTERRUPTED = 130


def available_commands() -> list[str]:
    return [name for name in COMMANDS if importlib.util.find_spec(f"mlxbatch.cli.{name}") is not None]


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlxbatch",
        description="One local model on your Mac serves everything that wants tokens, in one batch.",
        epilog="mlxbatch COMMAND --help shows the flags of a command.",
    )
    parser.add_argument("--version", action="version", version=f"mlxbatch {__version__}")
    return parser


def parse_without_command(arguments: Sequence[str]) -> int:
    """--help, --version, or no command at all: the commands are only names and help lines here."""
    parser = new_parser()
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name in available_commands():
        commands.add_parser(name, help=COMMANDS[name])
    parser.parse_args(arguments)
    parser.print_help(sys.stderr)
    return 2


def run_command(name: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"mlxbatch.cli.{name}")
    parser = new_parser()
    module.add_parser(parser.add_subparsers(metavar="COMMAND", required=True))
    code = int(module.run(parser.parse_args(arguments)))
    sys.stdout.flush()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # in a locale without it, a character is shown as "?"
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    verbose = "-v" in arguments or "--verbose" in arguments
    try:
        if name is None:
            return parse_without_command(arguments)
        if name not in available_commands():
            close = difflib.get_close_matches(name, available_commands(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "mlxbatch --help lists the commands"
            raise UsageError(f"there is no command {name!r}; {hint}")
        return run_command(name, arguments)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _discard_stdout()
        return INTERRUPTED
    except MlxbatchError as error:
        if verbose:
            _print_traceback()
        return _complain(str(error), error.exit_code)
    except OSError as error:  # a full disk, a file without permission: nothing a traceback explains
        if verbose:
            _print_traceback()
        where = f"{error.filename}: " if error.filename else "reading or writing failed: "
        return _complain(f"{where}{error.strerror or error}", 3)
    except Exception as error:
        if verbose:
            _print_traceback()
        hint = "" if verbose else "; -v shows where"
        return _complain(f"internal error: {type(error).__name__}: {error}{hint}", 3)


def _complain(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()
    print(f"mlxbatch: {message}", file=sys.stderr)
    return code


def _open_closed_streams() -> None:
    """Standard streams that the caller has closed (`<&-`): no file opened later must get their numbers.

    Reading such an input and writing to such an output fail, as they should; complaints are dropped.
    """
    if sys.stdin is None:
        sys.stdin = _devnull_at(0, os.O_WRONLY, "r")
    if sys.stdout is None:
        sys.stdout = _devnull_at(1, os.O_RDONLY, "w")
    if sys.stderr is None:
        sys.stderr = _devnull_at(2, os.O_WRONLY, "w")


def _devnull_at(descriptor: int, flags: int, mode: str) -> TextIO:
    opened = os.open(os.devnull, flags)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    return cast(TextIO, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def _print_traceback() -> None:
    import traceback

    traceback.print_exc()


def _discard_stdout() -> None:
    """Nobody can read it (`mlxbatch ... | head`): what is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
