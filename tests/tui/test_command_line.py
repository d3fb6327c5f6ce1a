"""mlxbatch chat and top without a terminal, and what the interface does not load."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from scenes import FORK_ANSWER, words
from scripted_engine import ScriptedEngine

from mlxbatch.errors import RequestError
from mlxbatch.history.records import Attachment
from mlxbatch.request import SamplingParams
from mlxbatch.tui.one_shot import ask


def mlxbatch(*arguments: str, stdin: str = "", folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        "MLXBATCH_CONFIG": str(folder / "config.toml"),
    }
    command = [sys.executable, "-m", "mlxbatch.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, timeout=120)


def test_chat_without_a_terminal_says_what_to_use(tmp_path: Path) -> None:
    result = mlxbatch("chat", stdin="hello", folder=tmp_path)
    assert result.returncode == 2
    assert 'echo "question" | mlxbatch chat -p -' in result.stderr
    assert "mlxbatch run -i FILE" in result.stderr
    assert not list(tmp_path.rglob("*.sqlite3"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chat", "-p", "-"), "there is no question"),
        (("chat", "-", "-p", "-"), "standard input can be read once"),
        (("chat", "missing.txt", "-p", "x"), "cannot read missing.txt"),
        (("chat", "-p", "x", "--temperature", "warm"), "--temperature: must be a number"),
        (("top", "--once"), "no engine is running"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = mlxbatch(*arguments, folder=tmp_path)
    assert result.returncode in (2, 3)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_what_is_no_utf8_is_refused_before_an_engine_is_asked(tmp_path: Path) -> None:
    latin1 = "\udce9"  # the byte E9, as it comes from the command line
    for arguments in (("-p", latin1), ("-p", "x", "--system", latin1)):
        result = mlxbatch("chat", *arguments, folder=tmp_path)
        assert (result.returncode, "UTF-8 text" in result.stderr) == (2, True)
    piped = [sys.executable, "-m", "mlxbatch.cli.main", "chat", "-p", "-"]
    done = subprocess.run(piped, input=b"\xe9", capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, b"mlxbatch: standard input is not UTF-8 text\n")


LOADED = """
import sys
import mlxbatch.tui.app, mlxbatch.tui.top_app, mlxbatch.tui.open_engine, mlxbatch.tui.one_shot
import mlxbatch.cli.chat, mlxbatch.cli.top
heavy = [name for name in ("mlx", "mlx.core", "mlx_lm", "transformers", "tokenizers", "torch") if name in sys.modules]
print(" ".join(heavy))
"""


def test_the_interface_loads_neither_mlx_nor_transformers() -> None:
    result = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


class PlayedEngine(ScriptedEngine):
    """Steps until the answer is whole as soon as it is asked."""

    async def submit(self, submit):
        tokens = await super().submit(submit)
        while self.running or self.queue:
            self.step()
        return tokens


def test_one_answer_on_standard_output() -> None:
    engine, output = PlayedEngine(script={"File a.txt": words(FORK_ANSWER)}), io.StringIO()
    params = SamplingParams(max_tokens=60, temperature=0.0)
    ask(engine, "And what is a fork?", [Attachment("a.txt", "text")], params, system_prompt="Short.", output=output)
    assert output.getvalue().startswith("A fork copies the **block table**")  # the thinking is left out
    assert output.getvalue().endswith("\n")
    (submit,) = engine.submitted
    assert submit.params == {"max_tokens": 60, "temperature": 0.0}
    assert [message["role"] for message in submit.messages] == ["system", "user"]
    assert submit.messages[1]["content"].startswith("File a.txt:")
    assert submit.priority == 0


def test_a_refused_question_raises() -> None:
    engine = PlayedEngine()
    engine.refusal = RequestError("it can never fit")
    with pytest.raises(RequestError, match="never fit"):
        ask(engine, "x", [], SamplingParams(max_tokens=None), output=io.StringIO())
