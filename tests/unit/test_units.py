from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.errors import UsageError
from mlxbatch.units import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4_000_000_000),
        ("4GiB", 4_294_967_296),
        ("4 gib", 4_294_967_296),
        ("1.1GB", 1_100_000_000),
        (".5MiB", 524_288),
        ("800 MB", 800_000_000),
        ("123", 123),
        ("1_000_000", 1_000_000),
        ("9007199254740993B", 9_007_199_254_740_993),
        (42, 42),
    ],
)
def test_sizes_are_read_exactly(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-4GB", "4 apples", "4G B", "1e9", -1, "4gb4", True, 1.5, [], None])
def test_a_wrong_size_is_refused(text: Any) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (8_589_934_592, "8.59 GB", "8.00 GiB"),
        (999_700_000, "1.00 GB", "953 MiB"),
        (12_345_678, "12.3 MB", "11.8 MiB"),
        (192 * 2**30, "206 GB", "192 GiB"),
    ],
)
def test_sizes_are_written_with_three_digits(count: int, decimal: str, binary: str) -> None:
    assert format_bytes(count) == decimal
    assert format_bytes(count, binary=True) == binary


@given(st.integers(min_value=0, max_value=10**15), st.booleans())
def test_a_written_size_reads_back_within_a_percent(count: int, binary: bool) -> None:
    assert parse_bytes(format_bytes(count, binary=binary)) == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize(
    ("text", "seconds", "written"),
    [
        ("50ms", 0.05, "50.0 ms"),
        ("420us", 0.00042, "420 us"),
        ("1.42s", 1.42, "1.42 s"),
        (2, 2.0, "2.00 s"),
        ("30min", 1800.0, "30 min 00 s"),
        ("2h", 7200.0, "2 h 00 min"),
        ("185", 185.0, "3 min 05 s"),
        ("3599.8", 3599.8, "1 h 00 min"),
    ],
)
def test_durations(text: str | float, seconds: float, written: str) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)
    assert format_seconds(seconds) == written


@pytest.mark.parametrize("text", ["", "soon", "-1s", "5 parsecs", -2, True, float("nan"), float("inf"), []])
def test_a_wrong_duration_is_refused(text: Any) -> None:
    with pytest.raises(UsageError):
        parse_seconds(text)
