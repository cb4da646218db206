"""Case L6: a run on hard text where the system speaks ASCII only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HARD = "\ufeffhéé 🎉 e\u0301 \0\r\n".encode() * 30 + b"\xff\xfe" * 20 + b"plain " * 100

TINY = ["--steps=2", "--context=8", "--width=8", "--heads=1", "--layers=1", "--batch=2"]


def test_a_run_on_hard_text_trains_and_prints_a_sample(tmp_path: Path) -> None:
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]}
    (tmp_path / "text").write_bytes(HARD)
    done = subprocess.run(
        [sys.executable, "-m", "minitrain_cli", "train", *TINY, "--data", "text"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"2 steps" in done.stdout + done.stderr
    (done.stdout + done.stderr).decode("ascii")  # nothing that this terminal cannot print
    assert b"text is not UTF-8 (byte 0xff" in done.stdout + done.stderr
