"""`--device gpu`: with the stand-in put in CuPy's place, and refused where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import standin
from click.testing import CliRunner, Result

from minitrain.array import namespace
from minitrain.comm.mpi.launch import MPIOptions
from minitrain.layout import LayoutError
from minitrain.parallel import ParallelModel
from minitrain.train import sample
from minitrain_cli.main import main
from minitrain_cli.ranks import RankRequest, Ranks, rank_options, read_ranks

SMALL = ("--preset", "nano", "--layers", 1, "--steps", 3, "--warmup", 1, "--data", "text.txt")
EXACT = (*SMALL, "--dtype", "float64")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test works: a folder with a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(b"It was the best of times, it was the worst. " * 30)
    return tmp_path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """Two pretended GPUs; the namespace and the GPU of each forward and backward are noted."""
    monkeypatch.setitem(sys.modules, "cupy", standin)
    seen: list[tuple[Any, int]] = []
    forward_backward = ParallelModel.forward_backward

    def noted(model: ParallelModel, *args: Any) -> Any:
        seen.append((namespace(model.lives.weights), standin.cuda.Device().id))
        return forward_backward(model, *args)

    monkeypatch.setattr(ParallelModel, "forward_backward", noted)
    return seen


def invoke(*args: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


def done(*args: Any) -> Result:
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result


def losses(folder: str) -> list[float]:
    """The losses of a run's steps, and after them that on the held-out text at its end."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["loss"] for record in records if "loss" in record] + [records[-1]["val_loss"]]


def test_a_run_on_gpus_is_that_on_the_cpu_and_may_change_places(
    gpus: list[tuple[Any, int]],
) -> None:
    """Each of three ranks takes the GPU of its place; the run goes on on the CPU, and back."""
    args = ("train", *EXACT, "--schedule", "constant", "--layout", "dp3")
    done(*args, "--steps", 5, "--run-dir", "cpu")
    assert {xp for xp, _ in gpus} == {np}
    gpus.clear()
    done(*args, "--run-dir", "gpu", "--device", "gpu")
    assert {xp for xp, _ in gpus} == {standin}
    assert sorted(number for _, number in gpus) == [0] * 3 * 2 + [1] * 3
    assert "device" not in Path("gpu/config.toml").read_text()
    done("train", "--resume", "--run-dir", "gpu", "--steps", 4, "--device", "cpu", "-n", 1)
    done("train", "--resume", "--run-dir", "gpu", "--steps", 5, "--device", "gpu", "-n", 1)
    assert gpus[-2:] == [(np, 0), (standin, 0)]
    assert losses("gpu") == pytest.approx(losses("cpu"), rel=1e-12)


def test_tensor_parallelism_in_half_precision_on_gpus(gpus: list[tuple[Any, int]]) -> None:
    # Few products: NumPy's own, which the stand-in takes, are very slow in float16.
    args = (*SMALL, "--batch", 1, "--context", 4, "--dtype", "float16", "--recompute", "full")
    args = (*args, "--layout", "tp2,sp", "--smoothing", 0.1)
    done("train", *args, "--run-dir", "cpu")
    gpus.clear()
    done("train", *args, "--run-dir", "gpu", "--device", "gpu")
    assert sorted(gpus, key=lambda seen: seen[1]) == [(standin, 0)] * 3 + [(standin, 1)] * 3
    assert losses("gpu") == pytest.approx(losses("cpu"), rel=1e-3)


def test_a_text_from_a_gpu_is_that_from_the_cpu(
    gpus: list[tuple[Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done("train", *EXACT, "--run-dir", "a")
    seen, generate = [], sample.generate

    def noted(model: Any, *args: Any, **more: Any) -> Any:
        seen.append({namespace(parameter.array) for parameter in model.parameters().values()})
        return generate(model, *args, **more)

    monkeypatch.setattr(sample, "generate", noted)
    texts = [done("generate", "a", "--tokens", 30, *more) for more in ((), ("--device", "gpu"))]
    assert texts[0].stdout == texts[1].stdout != ""
    assert seen == [{np}, {standin}]


def test_verify_holds_gpus_against_the_cpu(gpus: list[tuple[Any, int]]) -> None:
    args = ("--steps", 1, "--device", "gpu")
    assert "dp2,tp2: equal (" in done("verify", "dp2,tp2", *args).stdout
    assert set(gpus) == {(standin, 0), (standin, 1)}
    found = invoke("verify", "dp2", *args, "--fault", "rank-not-reduced")
    assert found.exit_code == 1
    assert "first: sgd step 1 gradient norm.bias on rank 0" in found.stdout


COMMANDS = [("train", *SMALL), ("verify", "dp2"), ("generate", "run/checkpoints/step-000003")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "pip install 'minitrain[cuda12]'"),
        (lambda: 0, "CuPy can use no GPU: it sees none; see what `nvidia-smi` says"),
        (lambda: 1 / 0, "CuPy can use no GPU: division by zero"),
    ],
    ids=["no CuPy", "no GPU", "a broken driver"],
)
def test_without_a_gpu_it_is_one_line_and_status_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: Any, module: Any, words: str
) -> None:
    done("train", *SMALL, "--run-dir", "run")
    before = sorted(folder.rglob("*"))
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=module))
    monkeypatch.setitem(sys.modules, "cupy", module and SimpleNamespace(cuda=cuda))
    result = invoke(*command, "--device", "gpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert "or take --device cpu" in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_mpi_can_be_told_how_messages_travel() -> None:
    """What the command line says comes to the transport, which others test under mpiexec."""
    given: list[MPIOptions] = []

    @click.command()
    @rank_options
    def probe(ranks: Ranks) -> None:
        given.append(ranks.options)

    def options_of(*words: str) -> MPIOptions:
        CliRunner().invoke(probe, words)
        return given.pop()

    assert options_of() == MPIOptions()
    mpi = ("--backend", "mpi")
    assert options_of("--cuda-aware", "--device", "gpu", *mpi) == MPIOptions(cuda_aware=True)
    assert options_of("--no-shared-memory", *mpi) == MPIOptions(shared_memory=False)
    both = ("--check-collectives", "--stall-timeout", "0", "--stall-abort")
    expected = MPIOptions(check_collectives=True, stall_timeout=None, stall_abort=True)
    assert options_of(*both, *mpi) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["--cuda-aware", "--device", "gpu"],
        ["--no-shared-memory"],
        ["--check-collectives"],
        ["--stall-timeout", "7"],
        ["--stall-abort"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_about_mpi_ranks_is_refused_for_threads(words: list[str]) -> None:
    result = invoke("verify", "dp2", *words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"{words[0]} is about MPI ranks, but these are threads" in result.stderr


def test_cuda_aware_is_about_gpus() -> None:
    with pytest.raises(LayoutError, match=r"--cuda-aware is about GPU memory, but --device is cpu"):
        read_ranks("dp2", [], RankRequest(None, None, "cpu", MPIOptions(cuda_aware=True)))
    result = invoke("verify", "dp2", "--cuda-aware")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
