"""Ask the terminal whether its background is light, before the interface takes it over."""

from __future__ import annotations

import os
import re
import select
import sys
import time

# OSC 11 asks for the background colour; the device attributes after it are answered by every terminal, so
# that one that ignores OSC 11 is not waited for.
_QUESTION = b"\x1b]11;?\x07\x1b[c"
_ATTRIBUTES = re.compile(rb"\x1b\[\?[\d;]*c")
_COLOUR = re.compile(rb"\x1b\]11;rgba?:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)")


def is_light_answer(answer: bytes) -> bool | None:
    """Whether the colour in a terminal's answer is light; None without one. Weights: ITU-R BT.709 luma."""
    match = _COLOUR.search(answer)
    if match is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in match.groups())
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5


def terminal_is_light(timeout: float = 0.2) -> bool | None:
    """Whether the terminal's background is light; None when it does not say within `timeout` seconds."""
    try:
        import termios
        import tty
    except ImportError:
        return None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    descriptor = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error:
        return None
    answer = b""
    try:
        tty.setcbreak(descriptor)
        os.write(sys.stdout.fileno(), _QUESTION)
        deadline = time.monotonic() + timeout
        while not _ATTRIBUTES.search(answer):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                break
            answer += os.read(descriptor, 256)
    except OSError:
        return None
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)
    return is_light_answer(answer)
