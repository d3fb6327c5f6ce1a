"""The mlxbatch command: quick to start, plain in its complaints."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlxbatch import __version__
from mlxbatch.cli import main as main_module
from mlxbatch.cli.main import COMMANDS, available_commands, main
from mlxbatch.errors import EngineError, UsageError

HEAVY = ("mlx", "mlx_lm", "transformers", "tokenizers", "numpy", "textual", "rich", "msgspec", "huggingface_hub")

LOADED = """
import json, sys
from mlxbatch.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def modules_after(*arguments: str) -> set[str]:
    """What a process has imported after running `mlxbatch` with these arguments."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_help_imports_almost_nothing() -> None:
    loaded = modules_after("--help")
    assert not loaded & set(HEAVY)
    ours = {name for name in loaded if name.startswith("mlxbatch")}
    assert ours == {"mlxbatch", "mlxbatch.cli", "mlxbatch.cli.main", "mlxbatch.errors"}


@pytest.mark.parametrize("command", available_commands())
def test_the_help_of_a_command_loads_no_model_code_and_no_interface(command: str) -> None:
    loaded = modules_after(command, "--help")
    assert not loaded & {"mlx", "mlx_lm", "transformers", "tokenizers", "textual", "rich"}


def test_checking_a_file_loads_no_model_code(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("hello\n")
    loaded = modules_after("run", "-i", str(tmp_path / "in.txt"), "--dry-run", "-q")
    assert "mlxbatch.batch.dryrun" in loaded
    assert not loaded & {"mlx", "mlx_lm", "transformers", "textual"}


def test_help_lists_the_commands_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert "run" in available_commands()
    for name in COMMANDS:
        assert (COMMANDS[name] in " ".join(shown.split())) == (name in available_commands())


def test_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"mlxbatch {__version__}\n"
    assert main([]) == 2
    assert "usage: mlxbatch" in capsys.readouterr().err


def test_a_mistyped_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum", "-i", "x"]) == 2
    assert "there is no command 'rum'; did you mean 'run'?" in capsys.readouterr().err


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """`mlxbatch run` raises `error`."""

    class Module(ModuleType):
        def add_parser(self, subparsers: Any) -> None:
            subparsers.add_parser("run").add_argument("-v", "--verbose", action="store_true")

        def run(self, args: Any) -> int:
            raise error

    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: Module(name))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("no such file"), 2, "mlxbatch: no such file"),
        (EngineError("out of memory"), 3, "mlxbatch: out of memory"),
        (OSError(28, "No space left on device"), 3, "mlxbatch: reading or writing failed: No space left on device"),
        (PermissionError(13, "Permission denied", "x.json"), 3, "mlxbatch: x.json: Permission denied"),
        (KeyboardInterrupt(), 130, "mlxbatch: interrupted"),
        (RuntimeError("a bug"), 3, "mlxbatch: internal error: RuntimeError: a bug; -v shows where"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    failing(monkeypatch, error)
    assert main(["run"]) == code
    assert capsys.readouterr().err == said + "\n"


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        ("<&-", 0, ""),
        (">&-", 3, "mlxbatch: reading or writing failed: Bad file descriptor\n"),
        (">/dev/full", 3, "mlxbatch: reading or writing failed: No space left on device\n"),
        ("<&- >&- 2>&-", 3, ""),
    ],
)
def test_a_closed_or_full_stream_is_no_internal_error(closed: str, code: int, said: str) -> None:
    command = f'"{sys.executable}" -m mlxbatch.cli.main models list {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_locale_without_a_character_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(ModuleType):
        def add_parser(self, subparsers: Any) -> None:
            subparsers.add_parser("run")

        def run(self, args: Any) -> int:
            print("one · two")
            return 0

    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: Module(name))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["run"]) == 0
    assert stdout.buffer.getvalue() == b"one ? two\n"  # type: ignore[attr-defined]


def test_verbose_shows_where_a_bug_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, RuntimeError("a bug"))
    assert main(["run", "-v"]) == 3
    assert "Traceback" in capsys.readouterr().err
