"""A session in a real terminal (tmux) with the real engine and model; its screens are kept in session/.

    .venv/bin/python tests/tui/tmux_session.py            # look on, and write tests/tui/session/*.txt

Three tabs answer at once, one is stopped, one regenerated; then quit, open again, kill -9, open again, search.
Each step waits for what it expects on the screen and fails with the screen as it was. Figures and times on the
screens differ from run to run, so they are kept to be read, not compared.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SCREENS = Path(__file__).parent / "session"
WIDTH, HEIGHT = 120, 36
PATIENCE = 240.0  # seconds for one step: loading the model on a busy machine included
QUESTIONS = (
    "Write a long story about a river.",
    "Explain how rain forms.",
    "List ten animals and say something about each of them.",
)


class Terminal:
    """One tmux server of our own, with one window."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "tmux"
        self.folder = folder
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),
            "MLXBATCH_CONFIG": str(folder / "config.toml"),
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
        }

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self.socket), "-f", "/dev/null", *arguments]
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
        return result.stdout

    def start(self, *command: str) -> None:
        self.tmux("new-session", "-d", "-x", str(WIDTH), "-y", str(HEIGHT), *command)
        self.tmux("set-option", "-g", "remain-on-exit", "on")

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self.socket), "kill-server"], capture_output=True, check=False)

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def wait(self, what: str, seen: Callable[[str], bool]) -> str:
        """The screen once `seen` holds for it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            screen = self.screen()
            if seen(screen):
                return screen
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}:\n{screen}")
            time.sleep(0.2)

    def ended(self) -> bool:
        return self.tmux("display-message", "-p", "#{pane_dead}").strip() == "1"


def play(folder: Path, keep: Callable[[str, str], None]) -> None:
    """The whole session. `keep(name, screen)` is given the screens worth reading."""
    program = str(Path(sys.executable).parent / "mlxbatch")
    chat = [program, "chat", "--history", str(folder / "history.sqlite3"), "--max-num-seqs", "4"]
    chat += ["--temperature", "0", "--max-tokens", "24", "--theme", "mlxbatch-dark"]
    terminal = Terminal(folder)
    try:
        terminal.start(*chat)
        terminal.wait("the engine to be ready", lambda screen: "ready · context" in screen)

        for number, question in enumerate(QUESTIONS):
            if number:
                terminal.press("C-n")
                terminal.wait("a new tab", lambda screen, n=number + 1: f"{n} new chat" in first(screen))
            terminal.type(question)
            terminal.press("Enter")
        keep("1_three_tabs", terminal.wait("three tabs answering", lambda s: first(s).count("●") == 3))
        terminal.press("C-g")
        keep("2_engine", terminal.wait("three rows decoding", lambda s: decoding(s) == 3))
        terminal.press("C-g")

        terminal.wait("some of the answer", lambda screen: re.search(r"· [2-9] tok ·", screen) is not None)
        terminal.press("Escape")
        keep("3_stopped", terminal.wait("the answer to stop", lambda screen: "■ stopped" in screen))

        terminal.press("C-PPage", "C-PPage")
        terminal.wait("the first tab", lambda screen: "Write a long story" in screen.splitlines()[3])
        terminal.wait("its answer to end", lambda screen: "cut at max_tokens" in screen or " ready " in screen)
        terminal.press("C-r")
        keep("4_regenerated", terminal.wait("a second version", lambda s: "‹ 2/2 ›" in s and "●" in first(s)))
        terminal.wait("all answers to end", lambda screen: not set("○◐●") & set(first(screen)))

        terminal.press("C-q")
        terminal.wait("the interface to end", lambda screen: terminal.ended())
        terminal.tmux("respawn-pane", "-k", *chat)
        keep("5_reopened", terminal.wait("tabs and history", lambda s: "‹ 2/2 ›" in s and "3 List" in first(s)))
        assert "1 Write a long story" in first(terminal.screen())
        assert "interrupted" not in terminal.screen()

        terminal.press("C-r")
        terminal.wait(
            "a third version to stream", lambda s: "‹ 3/3 ›" in s and re.search(r"· \d+ tok ", s) is not None
        )
        terminal.type("half a thou")
        terminal.wait("the draft", lambda screen: "half a thou" in screen)
        time.sleep(1.2)  # streamed text is saved every second
        os.kill(int(terminal.tmux("display-message", "-p", "#{pane_pid}")), signal.SIGKILL)
        terminal.wait("the interface to end", lambda screen: terminal.ended())
        terminal.tmux("respawn-pane", "-k", *chat)
        killed = terminal.wait("tabs, draft and answer", lambda s: "half a thou" in s and "■ interrupted" in s)
        assert "‹ 3/3 ›" in killed
        keep("6_killed", killed)

        terminal.press("C-s")
        terminal.wait("the history", lambda screen: "─ history ─" in screen)
        terminal.type("explain rain")
        keep("7_search", terminal.wait("a hit", lambda s: s.count("Explain how rain forms.") >= 2))
        terminal.press("Enter")
        terminal.wait("the chat that was found", lambda screen: "┃ Explain how rain forms." in screen)
        terminal.press("Escape")
        terminal.wait("the composer to have the focus", lambda screen: "answer again" not in screen)
        terminal.tmux("set-buffer", "first line\nsecond line\n  third line")
        terminal.tmux("paste-buffer", "-p")
        pasted = terminal.wait("three lines in the composer", lambda screen: "│   third line" in screen)
        assert "│ first line" in pasted and "│ second line" in pasted
        assert "you · " in pasted and "▌ first line" not in pasted  # nothing was sent
        terminal.press("C-q")
        terminal.wait("the interface to end", lambda screen: terminal.ended())
    finally:
        terminal.close()
        stop = [program, "engine", "stop", "--force"]
        subprocess.run(stop, env=terminal.environment, capture_output=True, check=False)


def first(screen: str) -> str:
    return screen.splitlines()[0]


def decoding(screen: str) -> int:
    return len(re.findall(r"^│ \w [ ▶].* decode ", screen, flags=re.MULTILINE))


def main() -> int:
    if shutil.which("tmux") is None:
        print("this session needs tmux", file=sys.stderr)
        return 2
    SCREENS.mkdir(exist_ok=True)

    def keep(name: str, screen: str) -> None:
        text = "\n".join(line.rstrip() for line in screen.splitlines()) + "\n"
        (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"{name}\n{text}")

    with tempfile.TemporaryDirectory(prefix="mlxbatch-") as folder:
        play(Path(folder), keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
