"""Training on MPI processes: equal to one device, stopped and resumed; the rest is on threads."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from minitrain.comm import Group, run_ranks
from minitrain.layout import Layout
from minitrain.nn import GPTConfig
from minitrain.oracle.task import Task
from minitrain.oracle.verify import gather_rows, verify_rank
from minitrain.train import loop
from minitrain.train.config.resolve import resolve
from minitrain.train.trace_file import TraceFile

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from chrome_format import assert_format, load, slices
from small_run import arrays, assert_bitwise, config, corpus, run_of, steps_of

TINY = GPTConfig(vocab=11, context=5, layers=1, heads=2, width=8, dropout=0.2)


def check_data_parallel_equals_one_device(group: Group) -> None:
    """On two ranks the preset nano for twenty steps; on others, sizes that do not divide."""
    task = Task(steps=20) if group.size == 2 else Task(TINY, batch=7, micro_batches=3, bucket=256)
    reference = task.reference()
    rows = verify_rank(group, Layout(dp=group.size), task, reference)
    found = gather_rows(group, rows, reference)
    assert not [str(row) for row in found if not row.ok]
    assert {row.rank for row in found} == set(range(group.size))


def check_a_pipeline_equals_one_device(group: Group) -> None:
    """A backward in two parts; with four ranks data ranks beside the stages."""
    layout = Layout(pp=group.size, schedule="zb-h1" if group.size > 1 else None)
    if group.size == 4:
        layout = Layout(dp=2, pp=2, schedule="interleaved")
    task = Task(GPTConfig(vocab=11, context=7, layers=3, heads=2, width=8, dropout=0.2),
                steps=2, batch=6, micro_batches=3, bucket=256)  # fmt: skip
    reference = task.reference()
    found = gather_rows(group, verify_rank(group, layout, task, reference), reference)
    assert not [str(row) for row in found if not row.ok]


def check_sharded_data_parallel_equals_one_device(group: Group) -> None:
    """Whole tensors with an owner, and gathered pieces of parameters."""
    task = Task(TINY, steps=2, batch=7, micro_batches=2, bucket=256)
    reference = task.reference()
    for layout in (
        Layout(shard=group.size, zero=2, owner=True),
        Layout(dp=2, shard=2, zero=3) if group.size == 4 else Layout(shard=group.size, zero=3),
    ):
        found = gather_rows(group, verify_rank(group, layout, task, reference), reference)
        assert not [str(row) for row in found if not row.ok]
        assert {row.rank for row in found} == set(range(group.size))


def shared_folder(group: Group) -> Path:
    """A new folder that all ranks know."""
    name = tempfile.mkdtemp() if group.rank == 0 else ""
    text = np.frombuffer(name.encode(), np.uint8)
    return Path(bytes(group.broadcast(text, 0, purpose="control")).decode())


def check_a_parameter_server_between_processes(group: Group) -> None:
    """In real time every push is applied; at staleness 0 the losses are synchronous training's."""
    path, layout = shared_folder(group), f"dp{group.size}"
    for name, flags in (("async", {"staleness": 1}), ("same", {"staleness": 0})):
        given = config(steps=4, batch=10, sync="async", **flags)
        loop.train(group, run_of(path / name, given, layout))
    loop.train(group, run_of(path / "sync", config(steps=4, batch=10), layout))
    group.barrier()
    if group.rank == 0:
        assert steps_of(path / "async")[-1]["version"] == 4 * group.size
        one, two = ([r["loss"] for r in steps_of(path / name)] for name in ("same", "sync"))
        np.testing.assert_allclose(one, two, rtol=1e-12)
        shutil.rmtree(path)
    group.barrier()


def check_local_sgd_between_processes(group: Group) -> None:
    """Each rank's moments are in the checkpoint, and a run goes on with them."""
    path, layout = shared_folder(group), f"dp{group.size}"
    given = config(steps=4, batch=10, sync="local", sync_every=2, eval_every=2, save_every=2)
    whole = loop.train(group, run_of(path, given, layout))
    start = path / "checkpoints" / "step-000002"
    assert loop.train(group, run_of(path, given, layout, start)) == whole
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(path)
    group.barrier()


def check_a_run_is_stopped_on_all_ranks_by_a_signal_to_one_and_resumed_bitwise(
    group: Group,
) -> None:
    """Cases K11, K12 and L12, and the same run on threads: bitwise, for both add alike."""
    path, layout = shared_folder(group), f"dp{group.size}"
    given = config(steps=6, batch=10, micro_batches=2)
    whole = loop.train(group, run_of(path / "whole", given, layout))

    run = run_of(path / "parted", given, layout)
    if group.rank == group.size - 1:
        run.stop.signal = signal.SIGTERM
    stopped = loop.train(group, run)
    assert (stopped.steps, stopped.stopped) == (1, signal.SIGTERM)
    start = path / "parted" / "checkpoints" / "step-000001"
    again = loop.train(group, run_of(path / "parted", given, layout, start))
    assert again == whole
    group.barrier()

    if group.rank == 0:
        assert_bitwise(arrays(path / "parted", 6), arrays(path / "whole", 6))
        threads = run_of(path / "threads", given, layout)
        assert run_ranks(group.size, loop.train, threads)[0].loss == whole.loss
        assert_bitwise(arrays(path / "threads", 6), arrays(path / "whole", 6))
        for record, on_threads in zip(
            steps_of(path / "whole"), steps_of(path / "threads"), strict=True
        ):
            assert record["comm_bytes"] == on_threads["comm_bytes"]
            assert record["comm_bytes_by_purpose"] == on_threads["comm_bytes_by_purpose"]
        assert corpus().held_out.size - 1 == 139
        shutil.rmtree(path)
    group.barrier()


def check_a_trace_is_of_all_ranks_on_one_clock(group: Group) -> None:
    """Every message has both its ends, and none comes before it is sent; so the same bytes."""
    path = shared_folder(group)
    layout = f"pp{group.size},zb-auto" if group.size > 1 else "dp1"
    given = config(steps=5, layers=4, batch=12, micro_batches=3)
    run = replace(run_of(path, given, layout), trace=TraceFile(None))
    loop.train(group, run)
    if group.rank == 0:
        document = load(run.folder.trace)
        assert_format(document, group.size)
        sends = [event["args"] for event in slices(document, "communication")]
        traced = sum(each.get("bytes", 0) + each.get("header_bytes", 0) for each in sends)
        assert traced == sum(record["comm_bytes"] for record in steps_of(path)[1:4])
        found = resolve(file=run.folder.config).run.instructions
        assert (found is None) == (group.size == 1)
        shutil.rmtree(path)
    group.barrier()
