"""Parameters, FLOPs and activations against what papers print."""

from __future__ import annotations

import pytest

from minitrain.errors import UserError
from minitrain.planner.architecture import (
    Architecture,
    activation_bytes,
    korthikanti_flops,
    palm_flops,
    sc21_flops,
    sc21_parameters,
    six_n_d,
)
from minitrain.planner.models import latent_attention, preset, presets, shape_of
from minitrain.planner.published import Run, runs

# Whose shape says less than the printed number: what is missing stands in the preset's note.
ROUGH = {"ERNIE 1.0": 0.1, "ERNIE 2.0": 0.02, "ERNIE 3.0 10B": 0.03, "CogView 4B": 0.02}
SC21 = [run for run in runs() if run.set == "sc21_t1"]


@pytest.mark.parametrize("name", presets())
def test_presets_have_the_printed_parameters(name: str) -> None:
    found = preset(name)
    assert found.parameters / 1e9 == pytest.approx(found.printed, rel=ROUGH.get(name, 0.015))
    assert found.source
    assert found.shape or found.note


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("GPT-2 XL", 1.5576), ("GPT-3 175B", 174.604), ("MT-NLG 530B", 529.601),
        ("LLaMA 7B", 6.7384), ("LLaMA 65B", 65.2857), ("Llama 3 8B", 8.0303),
        ("Llama 3 405B", 405.853), ("BLOOM 176B", 176.247), ("Llama 2 70B", 68.9766),
        ("DeepSeek-V3", 671.026), ("Mixtral 8x7B", 46.7028),
    ],
)  # fmt: skip
def test_exact_counts(name: str, billions: float) -> None:
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, abs=6e-4)


def test_a_mixture_activates_few_of_its_parameters() -> None:
    assert shape_of("DeepSeek-V3").active_parameters / 1e9 == pytest.approx(37.55, abs=0.05)
    assert shape_of("Mixtral 8x7B").active_parameters / 1e9 == pytest.approx(12.9, abs=0.05)
    dense = shape_of("GPT-3 175B")
    assert dense.active_parameters == dense.parameters


def test_latent_attention_is_the_presets_count() -> None:
    count = latent_attention(
        7168, 128, query_rank=1536, kv_rank=512, plain=128, rotary=64, value=128
    )
    assert shape_of("DeepSeek-V3").attention == count


def test_only_counts_where_no_shape_is_public() -> None:
    assert preset("elmo").shape is None
    with pytest.raises(UserError, match="only the number of parameters of ELMo is known"):
        shape_of("ELMo")
    with pytest.raises(UserError, match="did you mean GPT-3 175B"):
        preset("GPT-3 175")


def shape(run: Run) -> Architecture:
    found = run.shape()
    assert found
    return found


@pytest.mark.parametrize("run", SC21, ids=lambda run: run.name)
def test_sc21_parameters_and_flops(run: Run) -> None:
    model = shape(run)
    assert model.parameters / 1e9 == pytest.approx(run.number("parameters_b"), abs=0.1)
    done = run.number("tflops") * 1e12 * run.number("gpus") * run.number("seconds")
    per_step = run.number("batch") * 2048 * model.hardware_flops()
    assert per_step == pytest.approx(done, rel=5e-3)


def test_formulas_in_closed_form_are_the_sums_of_their_parts() -> None:
    model = shape(SC21[-1])
    l, h, v, s = model.layers, model.width, model.vocab, 2048  # noqa: E741
    assert model.parameters == pytest.approx(sc21_parameters(l, h, v, s) + 2 * h)
    assert model.hardware_flops() * 7 * s == pytest.approx(sc21_flops(7, l, h, v, s))
    assert model.model_flops() * 7 * s == pytest.approx(korthikanti_flops(7, l, h, v, s))


def test_palms_count_has_the_tables_and_no_others() -> None:
    model = shape_of("PaLM 540B")
    extra = palm_flops(model) - model.model_flops()
    assert palm_flops(model) > six_n_d(model.parameters, 1)
    assert extra / palm_flops(model) == pytest.approx(0, abs=2e-4)  # norms alone
    used = palm_flops(model) * 238.3e3 / (6144 * 275e12)
    assert used == pytest.approx(0.462, abs=0.001)  # the paper's MFU
    assert six_n_d(model.parameters, 238.3e3) / (6144 * 275e12) == pytest.approx(0.457, abs=0.001)


def test_a_causal_count_leaves_out_half_of_attention() -> None:
    model = shape_of("GPT-3 175B")
    saved = model.model_flops() - model.model_flops(causal=True)
    assert saved == pytest.approx(3 * model.forward_flops().attention / 2)


@pytest.mark.parametrize(
    ("name", "saved", "printed", "exact"),
    [("GPT-3 175B", 0.70, 0.027, 0.009), ("MT-NLG 530B", 0.65, 0.016, 0.0055)],
)
def test_selective_recomputation(name: str, saved: float, printed: float, exact: float) -> None:
    """Korthikanti et al. count attention's products twice; the repeated forward is a third."""
    model = shape_of(name)
    sizes = [activation_bytes(model, 1, 8, sp=True, recompute=r) for r in ("none", "selective")]
    assert 1 - sizes[1] / sizes[0] == pytest.approx(saved, abs=0.005)
    shapes = (1, model.layers, model.width, model.vocab, 2048)
    theirs = korthikanti_flops(*shapes, hardware=True) / korthikanti_flops(*shapes) - 1
    assert theirs == pytest.approx(printed, abs=0.001)
    ours = model.hardware_flops(recompute="selective") / model.model_flops() - 1
    assert ours == pytest.approx(exact, abs=0.0005)


@pytest.mark.parametrize(
    ("tp", "sp", "recompute", "each"),
    [
        (1, False, "none", 34 + 80), (8, False, "none", 10 + 24 / 8 + 80 / 8),
        (8, True, "none", (34 + 80) / 8), (8, False, "selective", 10 + 24 / 8),
        (8, True, "selective", 34 / 8), (8, False, "full", 2), (8, True, "full", 2 / 8),
    ],
)  # fmt: skip
def test_korthikanti_table_2(tp: int, sp: bool, recompute: str, each: float) -> None:
    """Bytes of a GPT-3 layer, where 5as/h is 80, in units of sbh."""
    model = shape_of("GPT-3 175B")
    found = activation_bytes(model, 3, tp, sp=sp, recompute=recompute)
    assert found / (3 * 2048 * 12288) == pytest.approx(each)


@pytest.mark.parametrize(
    ("name", "sp", "selective", "both", "full"),
    [("22B", 66.84, 49.42, 16.18, 7.64), ("175B", 62.04, 56.53, 18.49, 8.71)],
)
def test_korthikanti_figure_7(
    name: str, sp: float, selective: float, both: float, full: float
) -> None:
    """Per cent of the tensor-parallel baseline, within what the figure can be read to."""
    h, heads, layers = {"22B": (6144, 64, 48), "175B": (12288, 96, 96)}[name]
    model = Architecture.gpt(layers, h, heads, 51200, 2048)
    base = activation_bytes(model, 1, 8)
    mine = [
        activation_bytes(model, 1, 8, sp=cut, recompute=how) / base * 100
        for cut, how in ((True, "none"), (False, "selective"), (True, "selective"), (False, "full"))
    ]
    assert mine == pytest.approx([sp, selective, both, full], abs=1.0)
