"""Sizes and times are parsed from text and formatted as text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle._errors import InvalidBudget, RekindleError
from rekindle._units import format_bytes, format_ns, parse_bytes

UNITS = "B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
MORE = "more than 0 bytes"
NO_NUMBER = "text that does not start with a number"


@pytest.mark.parametrize(
    ("value", "n"),
    [
        (1, 1),
        (6_500_000_000, 6_500_000_000),
        (np.int64(4096), 4096),
        ("6GiB", 6 * 2**30),
        ("6 GiB", 6 * 2**30),
        (" 6gib\n", 6 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5gb", 1_500_000_000),
        ("1.1 TB", 1_100_000_000_000),  # exact, although 1.1 is not a binary fraction
        ("200_000_000", 200_000_000),
        ("1_000.5KB", 1_000_500),
        ("64KiB", 65_536),
        ("100 B", 100),
        ("2 TiB", 2 * 2**40),
        ("+3kb", 3000),
        ("0.3KiB", 307),  # 307.2 rounded down, because a budget is a cap
    ],
)
def test_parses(value: Any, n: int) -> None:
    assert parse_bytes(value) == n
    assert type(parse_bytes(value)) is int


@pytest.mark.parametrize(
    ("value", "got", "wanted", "write"),
    [
        ("6 Gigs", "the unknown unit 'Gigs'", UNITS, ["6GiB"]),
        ("1.5 meg", "the unknown unit 'meg'", UNITS, ["1.5MiB"]),
        ("50%", "the unknown unit '%'", UNITS, ["6GiB"]),
        ("1e9", "the unknown unit 'e9'", UNITS, ["6GiB"]),
        (
            "6.5m",
            "the unit 'm', which has two meanings",
            "MiB (6815744 bytes) or MB (6500000 bytes)",
            ["6.5MiB", "6.5MB"],
        ),
        ("1.5", "a fraction and no unit", f"a unit: {UNITS}", ["1.5GiB"]),
        ("", "empty text", f"a number and a unit: {UNITS}", ["6GiB"]),
        (
            "nan",
            "text that does not start with a number",
            f"a number and a unit: {UNITS}",
            ["6GiB"],
        ),
        ("0.8", "a fraction and no unit", f"a unit: {UNITS}", ["6GiB"]),
        ("-6 GiB", "a negative size", MORE, ["6 GiB"]),
        ("0GiB", "0 bytes", MORE, ["6GiB"]),
        ("0.5 B", "0 bytes", MORE, ["6GiB"]),
        (0, "0 bytes", MORE, ["6GiB"]),
        (-3, "a negative size", MORE, ["6GiB"]),
        ("-5", "a negative size", MORE, ["6GiB"]),
        (True, "a bool", "an int or text", ["6GiB"]),
        (6.5e9, "a float", "an int or text", [6500000000, "6.5GB"]),
        (6543210987.5, "a float", "an int or text", [6543210987]),
        (0.8, "a float", "an int or text", ["6GiB"]),
        (float("nan"), "a float", "an int or text", ["6GiB"]),
        (None, "an object of type NoneType", "an int or text", ["6GiB"]),
        (np.zeros(2), "an object of type ndarray", "an int or text", ["6GiB"]),  # has __index__
    ],
)
def test_refuses(value: Any, got: str, wanted: str, write: list[str | int]) -> None:
    lines = " or ".join(f"rekindle.budget({_quoted(size)})" for size in write)
    assert (
        _refusal(value) == f"rekindle.budget({value!r}): got {got}, wanted {wanted}; write {lines}"
    )


def test_a_refusal_in_full() -> None:
    assert _refusal("6 Gigs") == (
        "rekindle.budget('6 Gigs'): got the unknown unit 'Gigs', "
        "wanted B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024); "
        'write rekindle.budget("6GiB")'
    )


def test_a_refusal_is_short_however_long_the_text() -> None:
    # Python's int() refuses text with so many digits.
    assert _refusal("7" * 5000) == (
        "rekindle.budget('777777777777...7777777777777'): got 5000 characters, "
        'wanted a size of this world; write rekindle.budget("6GiB")'
    )


def _refusal(value: Any) -> str:
    with pytest.raises(InvalidBudget) as caught:
        parse_bytes(value)
    assert isinstance(caught.value, RekindleError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def _quoted(size: str | int) -> str:
    return f'"{size}"' if isinstance(size, str) else str(size)


def test_shows_the_line_of_the_caller() -> None:
    with pytest.raises(InvalidBudget, match=r"^--budget '6G': got .*; write --budget \"6GiB\" or "):
        parse_bytes("6G", line="--budget {}")


@given(st.text() | st.from_regex(r"[+-]?[\d_.]+ ?[kmgtKMGT]?[iI]?[bB]?", fullmatch=True))
@example("6_GiB")
@example("1__0B")
@example("-0")
@example("0.0001K")
@example("-6 Gigs")
@example("0.00000000000001")
@example("٣GiB")  # a digit of another script
def test_any_text_is_a_size_or_refused_with_lines_that_work(text: str) -> None:
    try:
        assert parse_bytes(text) > 0
    except InvalidBudget as error:
        _, _, advice = str(error).rpartition("; write ")
        sizes = re.findall(r"rekindle\.budget\(\"?(.*?)\"?\)", advice)
        assert sizes
        for size in sizes:
            assert parse_bytes(size) > 0


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not "1024.0 KiB"
        (312 * 2**20, "312.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (-3 * 2**29, "-1.50 GiB"),
        (5 * 2**50, "5120.00 TiB"),
    ],
)
def test_formats_bytes(n: int, text: str) -> None:
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (850, "850 ns"),
        (3_200, "3.2 us"),
        (999_960, "1.0 ms"),  # not "1000.0 us"
        (3_200_000, "3.2 ms"),
        (-3_200_000, "-3.2 ms"),
        (12_500_000_000, "12.50 s"),
        (59_994_999_999, "59.99 s"),
        (59_995_000_000, "1 min 00 s"),
        (125_000_000_000, "2 min 05 s"),
        (3_599_600_000_000, "1 h 00 min"),
        (3_720_000_000_000, "1 h 02 min"),
    ],
)
def test_formats_ns(ns: int, text: str) -> None:
    assert format_ns(ns) == text


@given(st.integers(1, 2**60))
def test_a_whole_number_is_read_exactly(n: int) -> None:
    assert parse_bytes(n) == parse_bytes(str(n)) == parse_bytes(f"{n:_} B") == n
    assert parse_bytes(f"{n}GiB") == n * 2**30
    assert parse_bytes(f"{n} mb") == n * 10**6


@given(st.integers(1, 2**49) | st.integers(0, 49).map(lambda power: 2**power))
@example(1024**2 - 1)
def test_formatted_bytes_parse_back_within_rounding(n: int) -> None:
    text = format_bytes(n)
    number, unit = text.split()
    last_digit = parse_bytes(f"1{unit}") / 10 ** len(number.partition(".")[2])
    assert abs(parse_bytes(text) - n) <= last_digit / 2 + 1  # 1: parsing rounds down to a byte
    assert float(number) < 1024


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_formatted_times_are_monotone(one: int, other: int) -> None:
    short, long = sorted([one, other])
    assert _seconds(format_ns(short)) <= _seconds(format_ns(long))


def _seconds(text: str) -> float:
    size = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    words = text.split()
    return sum(
        float(number) * size[unit] for number, unit in zip(words[::2], words[1::2], strict=True)
    )
