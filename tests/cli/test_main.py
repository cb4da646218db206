"""The console script: light help, one line for an error, streams that are closed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from minitrain.comm import LauncherError
from minitrain.comm.mpi import worlds
from minitrain.comm.mpi.launch import Launch
from minitrain_cli import main as script
from minitrain_cli import output
from minitrain_cli.main import COMMANDS, main

HEAVY = ("numpy", "rich", "mpi4py", "safetensors", "cupy")
REPORT = f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"


def python(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, check=False, **more
    )


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command: str) -> None:
    program = (
        "import sys\nfrom minitrain_cli.main import main\n"
        f"try: main({[*command.split(), '--help']}, prog_name='minitrain')\n"
        f"except SystemExit as leave: assert not leave.code\n{REPORT}"
    )
    done = python("-c", program)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert f"Usage: minitrain {command}".rstrip() in done.stdout
    assert all(name in done.stdout for name in (COMMANDS if not command else ()))


@pytest.mark.parametrize("module", ["minitrain", "minitrain.layout", "minitrain.comm"])
def test_packages_load_lazily(module: str) -> None:
    assert python("-c", f"import sys, {module}\n{REPORT}").stderr == "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_short_help_and_a_line_for_each_command(command: str) -> None:
    result = CliRunner().invoke(main, [command, "-h"])
    assert result.exit_code == 0
    options = [p for p in main.get_command(None, command).params if isinstance(p, click.Option)]  # type: ignore[arg-type]
    assert all(option.help for option in options)
    assert command in CliRunner().invoke(main, ["-h"]).output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "no such command 'trian'; did you mean train?"),
        (["zzz"], "no such command 'zzz'; there are train, verify, "),
        (["train", "--stesp", "3"], "'--steps', '--tp'"),
        (["train", "--layuot", "dp2"], "--layout"),
        (["verify", "--stepz", "3"], "--steps"),
        (["doctor", "--jsno"], "--json"),
        (["train", "--steps"], "Option '--steps' requires an argument"),
        (["train", "extra"], "unexpected extra argument"),
    ],
)
def test_an_error_of_usage_is_one_line_and_status_2(args: list[str], words: str) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.startswith("minitrain: ")
    assert result.stderr.count("\n") == 1


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"minitrain {version('minitrain')}\n"


@pytest.mark.parametrize("package", ["minitrain", "minitrain_cli"])
def test_the_package_runs_as_a_module(package: str) -> None:
    done = python("-m", package, "--version")
    assert done.stdout.startswith("minitrain ")


def test_a_launcher_of_another_mpi_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise LauncherError("the launcher belongs to another MPI")

    monkeypatch.setattr("minitrain_cli.ranks.Ranks.launch", refuse)
    result = CliRunner().invoke(main, ["verify", "dp2"])
    assert (result.exit_code, result.stderr) == (
        2,
        "minitrain: the launcher belongs to another MPI\n",
    )


def test_where_mpi_is_missing_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minitrain.comm.mpi.launch.shutil.which", lambda name: None)
    monkeypatch.setattr("minitrain.comm.mpi.launch.Path.exists", lambda path: False)
    result = CliRunner().invoke(main, ["verify", "dp2", "--backend", "mpi"])
    assert result.exit_code == 2
    assert "pip install 'minitrain[mpi]'" in result.stderr


def test_where_mpi4py_is_missing_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an mpiexec starts ranks that would all fail, and under one that has started them."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "mpi4py" else find_spec(name)
    )
    line = "minitrain: --backend mpi needs mpi4py: pip install 'minitrain[mpi]'\n"
    result = CliRunner().invoke(main, ["verify", "dp2", "--backend", "mpi"])
    assert (result.exit_code, result.stderr) == (2, line)
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    # Another test may have asked for the world of this process, which is made once.
    monkeypatch.setattr(worlds, "_transport", worlds._transport.__wrapped__)
    result = CliRunner().invoke(main, ["verify", "dp2"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "needs mpi4py: pip install 'minitrain[mpi]'" in result.stderr


def test_only_the_first_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, said in ((0, "minitrain: no\n"), (1, "")):
        launch = Launch("PMI_SIZE", 2, rank)
        for module in (script, output):
            monkeypatch.setattr(module, "launched", lambda launch=launch: launch)
        with pytest.raises(SystemExit) as caught:
            script.fail("no", 2)
        assert caught.value.code == 2
        assert capsys.readouterr().err == said
        # What the second rank did not say is kept for the case that it fails alone.
        assert getattr(caught.value, "__notes__", []) == ([] if rank == 0 else ["minitrain: no"])


@pytest.mark.skipif(os.name != "posix", reason="closes streams with a shell")
@pytest.mark.parametrize("closed", ["2>&-", ">&-", ">&- 2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_does_no_harm(closed: str) -> None:
    command = f"{sys.executable} -m minitrain_cli nonsense {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("minitrain: ") or "2>" in closed


def test_a_reader_that_leaves_does_no_harm() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "minitrain_cli", "nonsense"], stderr=writer,
                              timeout=60, check=False)  # fmt: skip
    finally:
        os.close(writer)
    assert done.returncode == 2


def under(rank: int, *args: str, size: str = "2") -> subprocess.CompletedProcess[str]:
    """A command as a launcher would start it as one of its ranks."""
    env = {**os.environ, "PMI_SIZE": size, "PMI_RANK": str(rank)}
    return python("-m", "minitrain_cli", *args, env=env)


@pytest.mark.parametrize(
    "args",
    [(), ("--help",), ("--version",), ("train", "--help"), ("generate", "-h"), ("doctor", "-h")],
    ids=" ".join,
)
def test_help_under_a_launcher_is_the_first_ranks(args: tuple[str, ...]) -> None:
    said = [under(rank, *args) for rank in (0, 1)]
    assert [done.returncode for done in said] == ([0, 0])
    assert said[0].stdout + said[0].stderr
    assert said[1].stdout + said[1].stderr == ""


@pytest.mark.parametrize("args", [("generate", "nothing"), ("convert", "a", "b")], ids=" ".join)
def test_commands_of_one_process_are_the_first_ranks(args: tuple[str, ...]) -> None:
    """No other rank writes, fails, or is waited for."""
    first, other = under(0, *args), under(1, *args)
    assert first.returncode == 2
    assert first.stderr.startswith("minitrain: ")
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")


def test_odd_words_of_a_launcher_are_one_line() -> None:
    env = {**os.environ, "PMI_SIZE": "2", "PMI_RANK": ""}
    for args in (("verify", "dp2"), ("doctor",), ("--help",)):
        done = python("-m", "minitrain_cli", *args, env=env)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("minitrain: PMI_SIZE='2' and PMI_RANK='' are no number of ")
        assert done.stderr.count("\n") == 1


def test_threads_that_are_asked_for_win_over_what_a_launcher_left() -> None:
    done = under(7, "verify", "dp2", "--steps", "1", "--backend", "threads", size="1")
    assert (done.returncode, done.stderr) == (0, "")
    done = under(7, "verify", "dp2", "--backend", "threads", "--stall-abort", size="1")
    assert "--stall-abort is about MPI ranks, but these are threads" in done.stderr


def users_files(folder: Path) -> None:
    """A working folder with names that Python and our dependencies have too."""
    for name in ("random", "signal", "click", "numpy", "rich", "select", "json", "mpi4py"):
        (folder / f"{name}.py").write_text("raise SystemExit('the user's own file')\n")


def test_the_users_files_are_not_imported(tmp_path: Path) -> None:
    users_files(tmp_path)
    script = Path(sys.executable).parent / "minitrain"
    args = ("verify", "dp2", "--steps", "1")
    ways = [(sys.executable, "-P", "-m", "minitrain_cli")]
    ways += [(str(script),)] if script.exists() else []
    for way in ways:
        done = subprocess.run([*way, *args], cwd=tmp_path, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
    # `python -m` itself looks into the folder first; what is ours does not.
    for name in ("signal", "select"):
        (tmp_path / f"{name}.py").unlink()
    done = python("-m", "minitrain_cli", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
def test_the_users_files_are_not_imported_by_mpi_ranks(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install 'minitrain[mpi]'")
    users_files(tmp_path)
    done = python("-P", "-m", "minitrain_cli", "verify", "dp2", "--steps", "1", "--backend", "mpi",
                  cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "dp2: equal" in done.stdout
