"""Where a command is tried: a folder of its own, with a text."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a text.txt in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(b"It was the best of times, it was the worst. " * 60)
    return tmp_path
