from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxoffload.errors import OptionsError
from fxoffload.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        (12 * 2**30, 12 * 2**30),
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("100kB", 100_000),
        ("100KB", 100_000),
        ("12gib", 12 * 2**30),
        ("0.5KiB", 512),
        (".5 kb", 500),
        ("1.25TiB", 5 * 2**38),
        ("1048576", 2**20),
        ("7 B", 7),
        ("  3 MB ", 3_000_000),
        ("1.0001KiB", 1024),  # 1024.1 bytes
        (1e9, 10**9),
        (1024.4, 1024),
    ],
)
def test_accepted_forms(value: int | str, expected: int) -> None:
    found = parse_bytes(value, "host_budget")
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "2Gi",
        "2 giga",
        "1,5GB",
        "1e9",
        "two MiB",
        "1.2.3MB",
        True,
        None,
        [1],
        float("nan"),
        float("inf"),
        0,
        -1,
        "0",
        "-2GiB",
        0.9,
        "0.5B",
    ],
)
def test_rejected_forms_name_the_option_and_what_is_accepted(value: object) -> None:
    with pytest.raises(ValueError, match="host_budget is ") as caught:
        parse_bytes(value, "host_budget")  # type: ignore[arg-type]
    assert isinstance(caught.value, OptionsError)
    assert repr(value) in str(caught.value)
    assert "'512 MiB'" in str(caught.value)


def test_zero_where_it_is_allowed() -> None:
    assert parse_bytes(0, "min_bytes", allow_zero=True) == 0
    assert parse_bytes("0 MiB", "min_bytes", allow_zero=True) == 0
    with pytest.raises(ValueError, match="0 or at least 1 byte"):
        parse_bytes(-1, "min_bytes", allow_zero=True)
    with pytest.raises(ValueError, match="min_bytes is False"):
        parse_bytes(False, "min_bytes", allow_zero=True)


@given(st.integers(1, 2**60), st.sampled_from(["kB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_large_sizes_are_exact(count: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    power = "kmg".index(unit[0].lower()) + 1
    assert parse_bytes(f"{count} {unit}", "x") == count * base**power


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (12 * 2**30, "12.0 GiB"),
        (-(2**20), "-1.0 MiB"),
    ],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
