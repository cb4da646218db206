"""What --data reads below a folder, and what it leaves out by name; files that are stand-ins."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_run import config, do

from minitrain.train.config.resolve import resolve
from minitrain.train.data.reading import TextError, once_only, read_text
from minitrain.train.data.text import Corpus
from minitrain.train.data.tokenizer import TokenizerError, tokenizer_of
from minitrain.train.download import problem

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def test_a_folder_that_is_a_run_is_never_data(tmp_path: Path) -> None:
    """`--data .` with runs inside: the second run and each resumption read the same text."""
    (tmp_path / "a.txt").write_text("one")
    before = read_text(tmp_path)
    do(tmp_path / "runs" / "0001-cpu", config(steps=1))
    (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
    (tmp_path / "mine" / "b.txt").write_text("two")  # an empty folder of that name is no run
    after = read_text(tmp_path)
    assert (before.content, after.content) == (b"one", b"one\ntwo")
    assert f"left out: {tmp_path / 'runs' / '0001-cpu'} (a run)" in after.notes[1]
    for path in ("0001-cpu", "0001-cpu/checkpoints", "0001-cpu/checkpoints/step-000001"):
        with pytest.raises(TextError, match="of minitrain, not a text"):
            read_text(tmp_path / "runs" / path)


def test_linked_folders_are_followed_once_and_circles_end(tmp_path: Path) -> None:
    top, other = tmp_path / "top", tmp_path / "other"
    (top / "in").mkdir(parents=True)
    (other / "deep").mkdir(parents=True)
    (top / "in" / "a.txt").write_text("A")
    (other / "b.txt").write_text("B")
    (other / "deep" / "c.txt").write_text("C")
    (top / "first").symlink_to(other)
    (top / "second").symlink_to(other / "deep")  # reached through `first` already
    (top / "in" / "self").symlink_to(top)
    (other / "back").symlink_to(top)
    text = read_text(top)
    assert text.content == b"B\nC\nA"
    assert list(text.sources) == ["first/b.txt", "first/deep/c.txt", "in/a.txt"]


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    text = read_text(tmp_path)
    assert text.content == b"A"
    assert f"{tmp_path / 'gone.txt'} (a broken link)" in text.notes[1]
    assert f"{tmp_path / 'pipe'} (a pipe or device)" in text.notes[1]


def test_a_pipe_is_read_and_warned_about(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"text",))
    writer.start()
    text = read_text(pipe)
    writer.join()
    assert text.content == b"text"
    assert "is a pipe, which can be read once only: to go on" in text.notes[0]
    assert once_only(pipe) == "a pipe"
    assert once_only("/dev/null") == "a device"
    assert once_only(tmp_path) is once_only(tmp_path / "none") is None


def test_a_device_without_an_end_is_refused() -> None:
    for name in ("zero", "urandom"):
        with pytest.raises(TextError, match="a device without an end"):
            read_text(Path("/dev", name))


def test_of_a_run_that_goes_on_only_its_own_files_count(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "log").write_text("")  # of `train >log`: empty when the run begins
    first = read_text(tmp_path)
    (tmp_path / "log").write_text("step 1")
    again = read_text(tmp_path, first.sources)
    assert again.content == first.content
    assert "those that the run began with" in again.notes[0]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(TextError, match=r"a\.txt cannot be read"):
        read_text(tmp_path, first.sources)


def test_a_byte_order_mark_is_treated_alike_everywhere(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"A")
    (tmp_path / "b.jsonl").write_bytes(mark + b'{"text": "B"}')
    (tmp_path / "c.txt").write_bytes(mark + b"C" + mark)  # inside, it is text
    assert read_text(tmp_path).content == b"A\nB\nC" + mark
    assert read_text(tmp_path / "a.txt").content == b"A"
    toml = tmp_path / "own.toml"
    toml.write_bytes(mark + b"[run]\nsteps = 7\n")
    assert resolve(file=toml).run.steps == 7
    pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    spec = tokenizer_of("bpe:260", b"a text to train on")
    file = tmp_path / "tokenizer.json"
    file.write_bytes(mark + spec.files["tokenizer.json"].encode())
    assert tokenizer_of(str(file)).vocab == spec.vocab


def test_a_pointer_is_called_that_by_file(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.bin"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(TextError, match=rf"{name} is a git-lfs pointer and not the file"):
            Corpus.load(tmp_path / name, 4, "byte" if name != "c.bin" else "ids:65536")
    with pytest.raises(TextError, match=r"a\.txt is a git-lfs pointer"):
        read_text(tmp_path)
    (tmp_path / "annexed").write_bytes(b"/annex/objects/MD5E-s7--0f2e\n")
    with pytest.raises(TextError, match="annexed is a git-annex pointer"):
        read_text(tmp_path / "annexed")
    pytest.importorskip("tokenizers", reason="pip install 'minitrain[tokenizers]'")
    (tmp_path / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is a git-lfs pointer"):
        tokenizer_of(str(tmp_path / "tokenizer.json"))


def test_half_a_download_is_called_that(tmp_path: Path) -> None:
    whole = tmp_path / "a.safetensors"
    save_file({"x": np.arange(100.0)}, whole)
    content = whole.read_bytes()
    assert problem(whole) is None
    for size in (0, 5, 8, 30, len(content) - 1):
        whole.write_bytes(content[:size])
        assert f"is half a download: it has {size}" in str(problem(whole))
    assert f"{len(content) - 1:,} of {len(content):,} bytes" in str(problem(whole))
    text = json.dumps({"a": [1, "two"], "b": None})
    file = tmp_path / "config.json"
    for size in range(1, len(text)):
        file.write_text(text[:size])
        assert "ends in the middle" in str(problem(file)), text[:size]
    file.write_text(text)
    assert problem(file) is None
    file.write_bytes(b"\n<!DOCTYPE html><title>404</title>")
    assert "is a web page" in str(problem(file))
    lines = tmp_path / "docs.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(TextError, match=r"line 2: .*ends there, as half a download does"):
        read_text(lines)
