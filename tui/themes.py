"""The two themes of our own. Textual's others, and ansi-dark / ansi-light for 16 colours, can be chosen too."""

from __future__ import annotations

import os
from collections.abc import Mapping

from textual.theme import Theme

DARK = Theme(
    name="mlxbatch-dark",
    primary="#7aa2f7",
    secondary="#8a8f98",
    accent="#bb9af7",
    success="#9ece6a",
    warning="#e0af68",
    error="#f7768e",
    foreground="#d6d6d6",
    background="#161616",
    surface="#1c1c1c",
    panel="#232323",
    dark=True,
    variables={
        "block-cursor-background": "#343a46",
        "block-cursor-foreground": "#ffffff",
        "input-selection-background": "#7aa2f7 30%",
        "border": "#5a6478",
        "border-blurred": "#3a3a3a",
        "scrollbar": "#3a3a3a",
        "scrollbar-hover": "#555555",
        "scrollbar-active": "#7aa2f7",
        "scrollbar-background": "#161616",
        "scrollbar-background-hover": "#161616",
        "scrollbar-background-active": "#161616",
        "markdown-h1-color": "#d6d6d6",
        "markdown-h1-background": "#161616",
        "markdown-h1-text-style": "bold underline",
        "markdown-h2-color": "#d6d6d6",
        "markdown-h2-text-style": "bold",
        "markdown-h3-color": "#d6d6d6",
        "markdown-h3-text-style": "bold",
    },
)

LIGHT = Theme(
    name="mlxbatch-light",
    primary="#2e5cb8",
    secondary="#6b7078",
    accent="#7847bd",
    success="#3f7317",
    warning="#8a5a00",
    error="#b3294e",
    foreground="#242424",
    background="#fbfbfa",
    surface="#f3f3f1",
    panel="#ebebe8",
    dark=False,
    variables={
        "block-cursor-background": "#d8e2f5",
        "block-cursor-foreground": "#000000",
        "input-selection-background": "#2e5cb8 25%",
        "border": "#8496b5",
        "border-blurred": "#cfcfca",
        "scrollbar": "#cfcfca",
        "scrollbar-hover": "#a8a8a2",
        "scrollbar-active": "#2e5cb8",
        "scrollbar-background": "#fbfbfa",
        "scrollbar-background-hover": "#fbfbfa",
        "scrollbar-background-active": "#fbfbfa",
        "markdown-h1-color": "#242424",
        "markdown-h1-background": "#fbfbfa",
        "markdown-h1-text-style": "bold underline",
        "markdown-h2-color": "#242424",
        "markdown-h2-text-style": "bold",
        "markdown-h3-color": "#242424",
        "markdown-h3-text-style": "bold",
    },
)

AUTO = "auto"


def choose_theme(wanted: str, environ: Mapping[str, str] | None = None, *, light: bool | None = None) -> str:
    """The theme's name for "auto": dark or light by the terminal's background, 16 colours where there are no
    more. `light` is what the terminal answered when asked; None if it said nothing."""
    if wanted != AUTO:
        return wanted
    environ = os.environ if environ is None else environ
    if light is None:
        # COLORFGBG is "foreground;background" in the 16 colours; 7 and 15 are white.
        light = environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
    terminal = environ.get("TERM", "")
    many = "256" in terminal or environ.get("COLORTERM", "") in ("truecolor", "24bit") or "kitty" in terminal
    if not many:
        return "ansi-light" if light else "ansi-dark"
    return LIGHT.name if light else DARK.name
