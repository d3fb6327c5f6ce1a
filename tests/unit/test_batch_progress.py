"""What a run shows of itself while it works."""

from collections.abc import Mapping
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from mlxbatch.batch.progress import BarReporter, Gauges, PlainReporter, SilentReporter, TokenRate, new_reporter
from mlxbatch.batch.totals import RunTotals

STATS = {"rows": 12, "max_num_seqs": 16, "kv_blocks_used": 30, "kv_blocks_total": 120}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def stats() -> Mapping[str, Any]:
    return STATS


def test_the_rate_is_that_of_the_last_seconds() -> None:
    clock = Clock()
    rate = TokenRate(clock)
    assert rate.update(0) == 0.0
    for second in range(1, 21):
        clock.now = 100.0 + second
        shown = rate.update(10 * second if second <= 10 else 100 + 50 * (second - 10))
        if second == 10:
            assert shown == pytest.approx(10.0)
    assert shown == pytest.approx(50.0)


def test_plain_lines_come_now_and_then() -> None:
    clock, out = Clock(), StringIO()
    reporter = PlainReporter(Console(file=out, width=200), clock)
    totals = RunTotals(requests=100)
    reporter.phase("loading a model")
    reporter.phase("loading a model")
    for _ in range(4 * 180):
        reporter.step(totals, stats)
        clock.now += 0.25
        totals.answered = int((clock.now - 100) / 4)
        totals.output_tokens = int((clock.now - 100) * 8)
    lines = out.getvalue().splitlines()
    assert lines[0] == "loading a model"
    assert lines[1] == "2 of 100 done, 8 tok/s, 1 min 55 s left, rows 12/16, KV 25%"  # 10 s for 2 and half of 12
    assert len(lines) == 1 + 6 + 1  # every ten seconds of the first minute, then every minute


def test_the_bar_shows_the_same_figures() -> None:
    clock, out = Clock(), Terminal()
    reporter = BarReporter(Console(file=out, force_terminal=True, width=120), clock)
    totals = RunTotals(requests=8, answered=3, failed=1)
    reporter.phase("loading", 1, 2)
    reporter.step(totals, stats)
    reporter.close()
    reporter.close()
    for word in ("4/8", "1 failed", "left", "rows 12/16", "KV 25%"):
        assert word in out.getvalue()


def test_an_engine_that_says_nothing_shows_no_gauges() -> None:
    assert Gauges.of({}) == Gauges()
    assert Gauges.of(STATS) == Gauges(12, 16, 0.25)


@pytest.mark.parametrize(
    ("stream", "style", "term", "expected"),
    [
        (Terminal(), "auto", "xterm", BarReporter),
        (Terminal(), "auto", "dumb", PlainReporter),
        (StringIO(), "auto", "xterm", PlainReporter),
        (StringIO(), "bar", "xterm", BarReporter),
        (Terminal(), "plain", "xterm", PlainReporter),
        (Terminal(), "none", "xterm", SilentReporter),
    ],
)
def test_a_bar_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, stream: StringIO, style: Any, term: str, expected: type
) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(new_reporter(style, stream=stream)) is expected


def test_none_keeps_notes_and_quiet_keeps_nothing() -> None:
    for quiet, shown in ((False, "careful\n"), (True, "")):
        out = StringIO()
        reporter = new_reporter("none", quiet=quiet, stream=out)
        reporter.note("careful")
        reporter.phase("loading")
        assert out.getvalue() == shown
