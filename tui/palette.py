"""What the roles of drawing.py look like in the theme of the moment."""

from __future__ import annotations

from collections.abc import Mapping

from rich.style import Style
from textual.color import Color
from textual.theme import Theme

_SLOT_HUES_DARK = ("#7aa2f7", "#9ece6a", "#e0af68", "#bb9af7", "#7dcfff", "#f7768e", "#73daca", "#d5a6bd")
_SLOT_HUES_LIGHT = ("#2e5cb8", "#4a7a1e", "#8a5a00", "#7847bd", "#006f94", "#b3294e", "#0f7a6c", "#8c4a6b")
_SLOT_HUES_ANSI = ("blue", "green", "yellow", "magenta", "cyan", "red", "bright_blue", "bright_magenta")


def make_palette(theme: Theme, variables: Mapping[str, str]) -> Mapping[str, Style]:
    """Role to style. `variables` are the theme's CSS variables (`App.theme_variables`).

    A role "upper|lower" is a half block: colour of the one on the colour of the other.
    """
    return Palette(_ansi_roles(theme) if theme.ansi else _colour_roles(theme, variables))


class Palette(dict[str, Style]):
    """Looks up half-block roles by their parts; an unknown role is plain text."""

    def __missing__(self, role: str) -> Style:
        upper, bar, lower = role.partition("|")
        style = Style(color=self[upper].color, bgcolor=self[lower].color) if bar else Style()
        self[role] = style
        return style


def _colour_roles(theme: Theme, variables: Mapping[str, str]) -> dict[str, Style]:
    def colour(name: str) -> Color:
        return Color.parse(variables[name])

    ground, ink = colour("background"), colour("foreground")

    def style(value: Color, *, bold: bool = False) -> Style:
        return Style(color=value.rich_color, bold=bold or None)

    def badge(value: Color) -> Style:
        return Style(color=ground.rich_color, bgcolor=value.rich_color, bold=True)

    accent, good = colour("primary"), colour("success")
    warn, bad, shared = colour("warning"), colour("error"), colour("accent")
    hues = _SLOT_HUES_DARK if theme.dark else _SLOT_HUES_LIGHT
    roles = {
        "text": style(ground.blend(ink, 0.88)),
        "strong": style(ink, bold=True),
        "title": style(ground.blend(ink, 0.88), bold=True),
        "dim": style(ground.blend(ink, 0.58)),
        "faint": style(ground.blend(ink, 0.36)),
        "frame": style(ground.blend(ink, 0.24)),
        "free": style(ground.blend(ink, 0.30)),
        "nothing": style(ground),
        "cached": style(ground.blend(ink, 0.48)),
        "shared": style(shared),
        "accent": style(accent, bold=True),
        "link": style(accent),
        "good": style(good),
        "warn": style(warn),
        "bad": style(bad),
        "decode": style(good),
        "prefill": style(accent),
        "key": style(accent, bold=True),
        "cursor": Style(color=ink.rich_color, bgcolor=ground.blend(ink, 0.16).rich_color, bold=True),
        "badge-good": badge(good),
        "badge-warn": badge(warn),
        "badge-bad": badge(bad),
        "badge-dim": badge(ground.blend(ink, 0.5)),
    }
    return roles | {f"slot{index}": style(Color.parse(hue)) for index, hue in enumerate(hues)}


def _ansi_roles(theme: Theme) -> dict[str, Style]:
    """The terminal's own 16 colours, so that its light or dark scheme decides.

    Plain and dim text keep the default colour: bright black is unreadable in some schemes.
    """
    roles = {
        "text": Style(),
        "strong": Style(bold=True),
        "title": Style(bold=True),
        "dim": Style(dim=True),
        "faint": Style(dim=True),
        "frame": Style(dim=True),
        "free": Style(dim=True),
        "nothing": Style(color="black" if theme.dark else "white"),
        "cached": Style(dim=True),
        "shared": Style(color="magenta"),
        "accent": Style(color="blue", bold=True),
        "link": Style(color="blue"),
        "good": Style(color="green"),
        "warn": Style(color="yellow" if theme.dark else "red"),
        "bad": Style(color="red", bold=True),
        "decode": Style(color="green"),
        "prefill": Style(color="blue"),
        "key": Style(bold=True),
        "cursor": Style(reverse=True, bold=True),
        "badge-good": Style(color="green", reverse=True, bold=True),
        "badge-warn": Style(color="yellow", reverse=True, bold=True),
        "badge-bad": Style(color="red", reverse=True, bold=True),
        "badge-dim": Style(reverse=True),
    }
    return roles | {f"slot{index}": Style(color=hue) for index, hue in enumerate(_SLOT_HUES_ANSI)}
