from __future__ import annotations

import pytest

from fxoffload.environment import PIECES, check_pieces, disabled_pieces, everything_disabled, phases_device_types


@pytest.mark.parametrize(
    ("value", "everything", "pieces"),
    [
        (None, False, ()),
        ("", False, ()),
        ("0", False, ()),
        ("false", False, ()),
        ("1", True, PIECES),
        (" True ", True, PIECES),
        ("prefetch", False, ("prefetch",)),
        ("offload, verify,", False, ("offload", "verify")),
    ],
)
def test_disable(
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
    everything: bool,
    pieces: tuple[str, ...],
) -> None:
    # Set after the import: the variable is read at the call.
    if value is None:
        monkeypatch.delenv("FXOFFLOAD_DISABLE", raising=False)
    else:
        monkeypatch.setenv("FXOFFLOAD_DISABLE", value)
    assert everything_disabled() is everything
    assert disabled_pieces() == frozenset(pieces)


def test_an_unknown_piece_lists_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_DISABLE", "offload,prefech")
    with pytest.raises(ValueError, match="FXOFFLOAD_DISABLE names unknown pieces: prefech") as caught:
        disabled_pieces()
    assert "did you mean 'prefetch'?" in str(caught.value)
    for piece in PIECES:
        assert piece in str(caught.value)


def test_check_pieces_names_its_source() -> None:
    assert check_pieces(("segments",), "disable") == {"segments"}
    with pytest.raises(ValueError, match="disable names unknown pieces: x, y"):
        check_pieces(("y", "segments", "x"), "disable")


@pytest.mark.parametrize(
    ("value", "types"),
    [(None, ("cuda",)), (" ", ("cuda",)), ("cpu", ("cpu",)), ("CUDA, cpu,", ("cuda", "cpu"))],
)
def test_phases_device_types(monkeypatch: pytest.MonkeyPatch, value: str | None, types: tuple[str, ...]) -> None:
    if value is None:
        monkeypatch.delenv("FXOFFLOAD_PHASES_DEVICE_TYPES", raising=False)
    else:
        monkeypatch.setenv("FXOFFLOAD_PHASES_DEVICE_TYPES", value)
    assert phases_device_types() == types


def test_an_unknown_device_type_lists_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_PHASES_DEVICE_TYPES", "cpu,cude")
    with pytest.raises(
        ValueError, match=r"unknown device type 'cude' \(did you mean 'cuda'\?\); the types are cuda, cpu"
    ):
        phases_device_types()
