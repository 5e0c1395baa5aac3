from __future__ import annotations

from pathlib import Path

import pytest

from fxoffload.machine import cache, lookup


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own, and nothing left of other tests'."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FXOFFLOAD_CACHE_DIR", str(folder))
    monkeypatch.delenv("FXOFFLOAD_PROFILE", raising=False)
    cache._unstored.clear()
    lookup._warn_once.cache_clear()
    return folder
