"""Lines, bars and figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from mlxbatch.tui import numbers
from mlxbatch.tui.drawing import Line, box, clip, column, printable, progress, sparkline

ANY_TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=30)


@given(ANY_TEXT, st.integers(0, 40))
def test_clip_is_exact_and_printable(text: str, width: int) -> None:
    assert cell_len(clip(printable(text), width)) == width


@given(st.lists(ANY_TEXT, max_size=4), st.integers(0, 50))
def test_fit_is_exact(parts: list[str], width: int) -> None:
    line = Line(*((part, "text") for part in parts)).fit(width)
    assert line.width == cell_len(line.text) == width


@given(st.lists(ANY_TEXT, max_size=6), ANY_TEXT, st.integers(6, 60), st.integers(2, 9))
def test_boxes_have_straight_edges(body: list[str], title: str, width: int, height: int) -> None:
    rows = box([(title, "title")], [Line((text, "text")) for text in body], width, height, [("end", "dim")])
    assert len(rows) == height
    assert {cell_len(row.text) for row in rows} == {width}


@given(ANY_TEXT)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not any((ord(c) < 0x20 and c not in "\t\n") or 0x7F <= ord(c) < 0xA0 for c in printable(text))
    assert len(printable(text)) == len(text)


def test_lines_hold_no_control_characters() -> None:
    assert Line(("\x1b[31mred", "text")).add("\x9b0m").text == "␛[31mred\ufffd0m"


def test_the_right_side_wins_over_the_left() -> None:
    assert Line(("a long left side", "text")).right([("end", "text")], 10).text == "a long…end"
    assert Line(("left", "text")).right([("end", "text")], 10).text == "left   end"


def test_progress_is_full_only_when_done() -> None:
    assert progress(0, 10, 5) == "╌╌╌╌╌"
    assert progress(1, 1000, 5) == "━╌╌╌╌"
    assert progress(999, 1000, 5) == "━━━━╌"
    assert progress(10, 10, 5) == "━━━━━"
    assert progress(3, 0, 5) == "╌╌╌╌╌"


def test_columns_show_anything_above_nothing() -> None:
    assert column(0, 10, 3) == "   "
    assert column(0.001, 10, 3) == "  ▁"
    assert column(5, 10, 3) == " ▄█"
    assert column(10, 10, 3) == "███"


def test_sparklines_scale_to_the_largest_and_average_what_does_not_fit() -> None:
    assert sparkline([], 4) == "    "
    assert sparkline([0, 0], 4) == "  ▁▁"
    assert sparkline([0, 1, 2, 4], 4) == "▁▃▅█"
    assert sparkline([4, 4, 0, 0], 2) == "█▁"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.count(1236), "1 236"),
        (numbers.short(32768), "32k"),
        (numbers.short(1200), "1.2k"),
        (numbers.short(999), "999"),
        (numbers.rate(50.84), "50.8"),
        (numbers.rate(182.2), "182"),
        (numbers.rate(None), "—"),
        (numbers.seconds(0.0004), "0.4 ms"),
        (numbers.seconds(0.31), "310 ms"),
        (numbers.seconds(0.9999), "1.0 s"),
        (numbers.seconds(4.2), "4.2 s"),
        (numbers.seconds(125), "2m05s"),
        (numbers.seconds(7260), "2h01m"),
        (numbers.size(2_260_000_000), "2.3 GB"),
        (numbers.size(512), "512 B"),
        (numbers.percent(0, 10), "0 %"),
        (numbers.percent(1, 1000), "<1 %"),
        (numbers.percent(999, 1000), "99 %"),
        (numbers.percent(10, 10), "100 %"),
        (numbers.percent(1, 0), "0 %"),
    ],
)
def test_figures(shown: str, expected: str) -> None:
    assert shown == expected
