"""Every axis of a layout on the stand-in for CuPy, as on NumPy."""

from __future__ import annotations

import pytest
import standin
from device_layouts import check_layout


@pytest.mark.parametrize("layout", ["tp2", "tp2,sp", "dp2,tp2,sp"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_training(name: str, layout: str) -> None:
    check_layout(name, layout, standin)


def test_training_with_shared_key_value_heads_and_recomputation() -> None:
    check_layout("llama", "tp4,sp", standin, recompute="full")


@pytest.mark.parametrize(
    "layout", ["shard2,zero1", "shard2,zero2", "shard2,zero2,owner", "dp2,shard2,zero3,keep"]
)
def test_training_with_sharded_states(layout: str) -> None:
    check_layout("gpt", layout, standin)


@pytest.mark.parametrize("layout", ["dp2", "dp2,ep2", "dp2,ep2,tp2,sp", "shard2,zero3,ep2"])
def test_training_a_mixture_of_experts(layout: str) -> None:
    check_layout("mixture", layout, standin)


@pytest.mark.parametrize("layout", ["pp2,1f1b", "pp2,zb-v", "dp2,pp2,zb-h1"])
def test_training_with_a_pipeline(layout: str) -> None:
    check_layout("gpt", layout, standin)


@pytest.mark.parametrize("layout", ["cp3", "cp2,ring", "cp2,gather", "cp4,ulysses2", "cp2,ulysses"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_training_with_cut_sequences(name: str, layout: str) -> None:
    check_layout(name, layout, standin)
