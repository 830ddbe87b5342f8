"""Tests of parsing and formatting sizes and times."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle import InvalidBudget, RekindleError
from rekindle._units import format_at_least, format_bytes, format_ns, parse_bytes

UNITS = "B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"
MORE = "more than 0 bytes"
TOO_MUCH = "2**63 bytes or more"
LESS = "less than 2**63 bytes (8 EiB)"
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
        (2**63 - 1, 2**63 - 1),
        ("+3kb", 3000),
        ("0.3KiB", 307),  # 307.2 rounded down, because a budget is a cap
    ],
)
def test_parse_bytes_of_valid_text_returns_bytes(value: Any, n: int) -> None:
    assert parse_bytes(value) == n
    assert type(parse_bytes(value)) is int


@pytest.mark.parametrize(
    ("value", "got", "wanted", "write"),
    [
        ("6 Gigs", "the unknown unit 'Gigs'", UNITS, ["6GiB"]),
        ("1.5 meg", "the unknown unit 'meg'", UNITS, ["1.5MiB"]),
        ("1e9", "a number with an exponent", "an int, or a number and a unit", [1000000000, "1GB"]),
        (
            "2.5E9",
            "a number with an exponent",
            "an int, or a number and a unit",
            [2500000000, "2.5GB"],
        ),
        ("1e30", "a number with an exponent", "an int, or a number and a unit", ["6GiB"]),
        ("1e999", "a number with an exponent", "an int, or a number and a unit", ["6GiB"]),
        ("1efg", "the unknown unit 'efg'", UNITS, ["6GiB"]),
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
        (1.5, "a float", "an int or text", ["1.5GiB"]),
        (24.0, "a float", "an int or text", ["24GiB"]),
        (1e30, "a float", "an int or text", ["6GiB"]),
        (float("inf"), "a float", "an int or text", ["6GiB"]),
        (np.float32(2e9), "a float32", "an int or text", [2000000000, "2GB"]),
        (np.float16(0.5), "a float16", "an int or text", ["6GiB"]),
        (2**63, TOO_MUCH, LESS, ["6GiB"]),
        (10**25, TOO_MUCH, LESS, ["6GiB"]),
        ("99999999TB", TOO_MUCH, LESS, ["6GiB"]),
        ("99999999t", "the unknown unit 't'", UNITS, ["6GiB"]),
        ("99999999999.5", "a fraction and no unit", f"a unit: {UNITS}", ["6GiB"]),
        ("-99999999TB", "a negative size", MORE, ["6GiB"]),
        (float("nan"), "a float", "an int or text", ["6GiB"]),
        (None, "an object of type NoneType", "an int or text", ["6GiB"]),
        # an integer type with __index__
        (np.zeros(2), "an object of type ndarray", "an int or text", ["6GiB"]),
    ],
)
def test_parse_bytes_of_wrong_text_is_refused(
    value: Any, got: str, wanted: str, write: list[str | int]
) -> None:
    lines = " or ".join(f"rekindle.budget({_quoted(size)})" for size in write)
    assert (
        _refusal(value) == f"rekindle.budget({value!r}): got {got}, wanted {wanted}; write {lines}"
    )


def test_error_for_wrong_size_has_full_message() -> None:
    assert _refusal("6 Gigs") == (
        "rekindle.budget('6 Gigs'): got the unknown unit 'Gigs', "
        "wanted B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024); "
        'write rekindle.budget("6GiB")'
    )


def test_error_for_int_too_long_to_write_is_complete() -> None:
    assert _refusal(10**6000).startswith(f"rekindle.budget(...): got {TOO_MUCH}, wanted {LESS}; ")


def test_error_for_share_says_how_to_find_peak() -> None:
    assert _refusal("60%") == (
        "rekindle.budget('60%'): got a share, wanted an amount of bytes: B, KB, MB, GB, TB (powers "
        'of 1000) or KiB, MiB, GiB, TiB (powers of 1024); write rekindle.budget("6GiB"). To find '
        "the memory peak for a share: rekindle run --profile train.py"
    )


def test_error_for_wrong_size_is_short_for_long_text() -> None:
    # Python's int() refuses text with so many digits.
    assert _refusal("7" * 5000) == (
        "rekindle.budget('777777777777...7777777777777'): got 5000 characters, "
        'wanted at most 40 characters; write rekindle.budget("6GiB")'
    )


def _refusal(value: Any) -> str:
    with pytest.raises(InvalidBudget) as caught:
        parse_bytes(value)
    assert isinstance(caught.value, RekindleError)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def _quoted(size: str | int) -> str:
    return f'"{size}"' if isinstance(size, str) else str(size)


def test_error_for_wrong_size_suggests_line_of_caller() -> None:
    with pytest.raises(InvalidBudget, match=r"^--budget '6G': got .*; write --budget \"6GiB\" or "):
        parse_bytes("6G", line="--budget {}")


@given(st.text() | st.from_regex(r"[+-]?[\d_.]+ ?[kmgtKMGT]?[iI]?[bB]?", fullmatch=True))
@example("6_GiB")
@example("99999999t")
@example("9e18")
@example("1__0B")
@example("-0")
@example("0.0001K")
@example("-6 Gigs")
@example("0.00000000000001")
@example("٣GiB")  # a digit of another script
def test_any_text_is_parsed_or_refused_with_valid_suggestion(text: str) -> None:
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
        (2**20 - 1, "1.0 MiB"),  # and not "1024.0 KiB"
        (312 * 2**20, "312.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (-3 * 2**29, "-1.50 GiB"),
        (5 * 2**50, "5120.00 TiB"),
    ],
)
def test_format_bytes_chooses_readable_unit(n: int, text: str) -> None:
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
def test_format_ns_chooses_readable_unit(ns: int, text: str) -> None:
    assert format_ns(ns) == text


@given(st.integers(1, 2**33 - 1))  # less than 2**63 bytes in GiB
def test_text_of_whole_bytes_is_parsed_exactly(n: int) -> None:
    assert parse_bytes(n) == parse_bytes(str(n)) == parse_bytes(f"{n:_} B") == n
    assert parse_bytes(f"{n}GiB") == n * 2**30
    assert parse_bytes(f"{n} mb") == n * 10**6


@given(st.integers(1, 2**49))
@example(1024**2 - 1)
def test_text_rounded_up_is_no_less_than_bytes(n: int) -> None:
    found = parse_bytes(format_at_least(n))
    assert n <= found <= 1.101 * n


@given(st.integers(1, 2**49) | st.integers(0, 49).map(lambda power: 2**power))
@example(1024**2 - 1)
def test_formatted_bytes_parse_back_within_rounding(n: int) -> None:
    text = format_bytes(n)
    number, unit = text.split()
    last_digit = parse_bytes(f"1{unit}") / 10 ** len(number.partition(".")[2])
    # difference of 1, because parsing rounds down to a byte
    assert abs(parse_bytes(text) - n) <= last_digit / 2 + 1
    assert float(number) < 1024


@given(st.integers(0, 10**15), st.integers(0, 10**15))
def test_formatted_times_are_in_order_of_times(one: int, other: int) -> None:
    short, long = sorted([one, other])
    assert _seconds(format_ns(short)) <= _seconds(format_ns(long))


def _seconds(text: str) -> float:
    size = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    words = text.split()
    return sum(
        float(number) * size[unit] for number, unit in zip(words[::2], words[1::2], strict=True)
    )
