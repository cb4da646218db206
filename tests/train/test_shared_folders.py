"""Several runs at once: each has a folder of its own, and no folder has two runs in it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_run import config, corpus, do, run_of

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPT, GPTConfig
from minitrain.train.checkpoint.weights import save_model
from minitrain.train.data.tokenizer import ByteTokenizer
from minitrain.train.folder import FolderError, RunFolder, next_free
from minitrain.train.loop import train
from minitrain.train.resume import resumed
from minitrain.train.run import Run


def test_runs_that_start_at_once_get_numbers_of_their_own(tmp_path: Path) -> None:
    """All propose the same number, of three presets; no two folders have one number, and every one
    that was made is somebody's. A number that two tried for at once may stay free."""
    start = threading.Barrier(12)

    def claim(i: int) -> Path:
        folder = next_free(("cpu", "nano", "own")[i % 3], tmp_path / "runs")
        start.wait()
        return folder.claim().path

    with ThreadPoolExecutor(12) as pool:
        paths = list(pool.map(claim, range(12)))
    assert len({path.name[:4] for path in paths}) == 12
    assert set(paths) == set((tmp_path / "runs").iterdir())


def test_ranks_agree_on_the_number_that_was_got(tmp_path: Path) -> None:
    """Each rank proposes for itself, and only the first one claims."""
    proposed = next_free("cpu", tmp_path)
    (tmp_path / "0001-nano").mkdir()

    def program(group: Group) -> Any:
        run = Run(config(steps=1), Layout.parse("tp2"), corpus(), proposed, None)
        return train(group, run).run_dir

    assert set(run_ranks(2, program)) == {str(tmp_path / "0002-cpu")}
    kept = tmp_path / "0002-cpu" / "checkpoints" / "step-000001"
    assert len(list(kept.glob("rank-*"))) == 2


HOLDER = """
    import sys, time
    from pathlib import Path
    from minitrain.train.folder import RunFolder
    with RunFolder(Path(sys.argv[1])).in_use():
        print("locked", flush=True)
        time.sleep(100)
"""


def test_a_run_in_use_is_refused_until_its_process_dies(tmp_path: Path) -> None:
    do(tmp_path, config(steps=2))
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "locked\n"
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with pytest.raises(FolderError, match="is in use: another process trains this run; wait"):
            resumed(RunFolder(tmp_path), [], {"steps": "3"})
        start = tmp_path / "checkpoints" / "step-000002"
        with pytest.raises(FolderError, match="is in use"):
            do(tmp_path, config(steps=3), start=start)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    finally:
        holder.kill()  # as kill -9: nothing is left that would have to be cleared away
        holder.wait()
        holder.stdout.close()
    assert do(tmp_path, config(steps=3), start=start).steps == 3


def test_the_lock_ends_with_the_run_and_looking_does_not_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.in_use(shared=True), folder.in_use(shared=True):
        pass
    run = run_of(tmp_path, config(steps=1))

    class Looking:
        def opened(self, path: Path) -> None:
            with pytest.raises(FolderError, match="in use"), folder.in_use(shared=True):
                pass

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    run_ranks(1, train, run, Looking())
    with folder.in_use():
        pass


def test_a_file_system_without_locks_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert do(tmp_path, config(steps=1)).steps == 1


def converted(path: Path) -> RunFolder:
    model = GPT(GPTConfig(vocab=256, context=8, layers=1, heads=2, width=8))
    for parameter in model.parameters().values():
        parameter.array = np.zeros(parameter.declared, np.float32)
    save_model(model, ByteTokenizer(), path / "checkpoints")
    return RunFolder(path)


def test_a_folder_that_holds_checkpoints_gets_no_run(tmp_path: Path) -> None:
    """What `convert` has made; its folder of checkpoints; and one checkpoint."""
    folder = converted(tmp_path / "model")
    with pytest.raises(
        FolderError, match=r"model is a folder with checkpoints already.*take another"
    ):
        folder.check_free()
    for path, kind in ((folder.checkpoints, "a folder of checkpoints"),
                       (folder.checkpoints / "step-000000", "a checkpoint")):  # fmt: skip
        with pytest.raises(FolderError, match=f"is {kind} already"):
            RunFolder(path).check_free()
    with pytest.raises(FolderError, match=r"such as a converted model.*in another --run-dir"):
        resumed(folder, [], {})
