"""Tensor and sequence parallelism on MPI processes; the rest is on threads."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from minitrain.comm import Group
from minitrain.layout import Layout
from minitrain.nn import GPTConfig, LlamaConfig
from minitrain.nn.config import Config
from minitrain.oracle.task import Task
from minitrain.oracle.verify import gather_rows, verify_rank
from minitrain.parallel import Mesh
from minitrain.train import loop

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from checks_train import shared_folder
from small_run import arrays, config, do, run_of

GPT = GPTConfig(vocab=11, context=7, layers=1, heads=5, width=10, dropout=0.2)
LLAMA = LlamaConfig(vocab=11, context=7, layers=1, heads=6, kv_heads=2, width=24, hidden=7)


def hold(group: Group, layout: Layout, model: Config) -> None:
    """Every tensor of every rank, against one device."""
    task = Task(model, steps=2, batch=4, micro_batches=1, bucket=256)
    reference = task.reference()
    found = gather_rows(group, verify_rank(group, layout, task, reference), reference)
    assert not [str(row) for row in found if not row.ok]
    assert {row.rank for row in found} == set(range(group.size))


def check_tensor_parallel_equals_one_device(group: Group) -> None:
    hold(group, Layout(tp=group.size), GPT)
    hold(group, Layout(tp=group.size), LLAMA)


def check_sequence_parallel_equals_one_device(group: Group) -> None:
    hold(group, Layout(tp=group.size, sp=True), GPT)
    hold(group, Layout(tp=group.size, sp=True), LLAMA)


def check_data_and_sequence_parallel_equal_one_device(group: Group) -> None:
    if group.size == 4:
        hold(group, Layout(dp=2, tp=2, sp=True), GPT)


def check_a_mesh_knows_that_all_ranks_share_this_machine(group: Group) -> None:
    mesh = Mesh(group, Layout(tp=group.size))
    assert mesh.nodes == (0,) * group.size
    assert mesh.advice() == []


def check_a_cut_run_trains_as_one_device(group: Group) -> None:
    """Rank by rank its own part goes to the checkpoint, whose whole is that of one device."""
    if group.size not in (2, 4):
        return
    layout = "tp2,sp" if group.size == 2 else "dp2,tp2,sp"
    path, given = shared_folder(group), config(steps=4, epsilon=1e-2)
    loop.train(group, run_of(path / "cut", given, layout))
    group.barrier()
    if group.rank == 0:
        do(path / "one", given)
        mine, reference = arrays(path / "cut", 4), arrays(path / "one", 4)
        assert mine.keys() == reference.keys()
        for key, x in reference.items():
            assert np.abs(mine[key] - x).max() < 1e-12 * max(np.abs(x).max(), 1e-2), key
        shutil.rmtree(path)
    group.barrier()
