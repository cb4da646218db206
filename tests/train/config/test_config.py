"""Options: read from four places, refused in one line, written so that they read back."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.optim import SHAPES
from minitrain.train.build import schedule_of
from minitrain.train.config.option import ConfigError, options_of
from minitrain.train.config.resolve import check, notes, resolve, to_toml
from minitrain.train.config.sections import (
    OPTIONS,
    DataSection,
    LossSection,
    MixtureSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
)

positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
fraction = st.floats(min_value=0, max_value=1, exclude_max=True)
count = st.integers(1, 10**20)
size = st.integers(1, 2**31 - 1)
rates = st.tuples(positive, st.floats(0, allow_infinity=False)).map(sorted)
paths = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda t: t != "none")


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    heads, (min_lr, lr) = draw(st.integers(1, 99)), draw(rates)
    return RunConfig(
        ModelSection("gpt", draw(size), heads, None, heads * draw(st.integers(1, 9)), 1, 0.5),
        draw(
            st.builds(
                MixtureSection,
                experts=st.just(9),
                top_k=st.integers(1, 9),
                hidden=st.none() | size,
                scores=st.sampled_from(["softmax", "sigmoid"]),
                capacity=st.none() | positive,
                balance=positive,
            )
        ),
        DataSection(draw(st.none() | paths), draw(paths), "apart", 2**31 - 1, draw(size)),
        LossSection(draw(fraction), draw(st.floats(0, allow_infinity=False))),
        OptimizerSection(
            name=draw(st.sampled_from(["adamw", "sgd"])),
            lr=lr,
            min_lr=min_lr,
            warmup=draw(count),
            schedule=draw(st.sampled_from(["cosine", "wsd"])),
            beta1=draw(fraction),
            beta2=draw(fraction),
            epsilon=draw(positive),
            momentum=draw(fraction),
            weight_decay=draw(st.floats(0, allow_infinity=False)),
            clip=draw(st.none() | positive),
        ),
        RunSection(
            draw(count),
            draw(count),
            "float64",
            "full",
            draw(st.sampled_from([None, "1,0", "1"])),
            draw(st.sampled_from([None, "1,2,3", "1,2,3,0.5"])),
            draw(st.none() | st.floats(1, allow_infinity=False)),
            draw(st.sampled_from([None, "F0 B0 / F0 I0 W0", "F0 F0.1 B0.1 B0"])),
            draw(count),
            draw(count),
        ),
    )


@given(config=configs())
def test_what_is_written_reads_back_equal(config: RunConfig, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert resolve("nano", file) == config


def test_none_is_written_over_a_preset_that_has_a_value(tmp_path: Path) -> None:
    config = resolve(flags={"clip": "none", "data": 'a "b" \\ \x7f\n'})
    assert (config.optimizer.clip, config.data.path) == (None, 'a "b" \\ \x7f\n')
    assert tomllib.loads(to_toml(config))["optimizer"]["clip"] == "none"
    (tmp_path / "c.toml").write_text(to_toml(config), encoding="utf-8")
    assert resolve(file=tmp_path / "c.toml") == config


def test_presets() -> None:
    assert resolve() == resolve("small") == resolve("cpu") == RunConfig()
    small, nano = resolve("small"), resolve("nano")
    assert (small.model, small.data.batch) == (ModelSection("gpt", 4, 4, None, 128, 64, 0.0), 12)
    assert (nano.model, nano.data.batch) == (ModelSection("gpt", 4, 8, None, 32, 16, 0.0), 24)
    assert nano.optimizer == small.optimizer == OptimizerSection("adamw", 1e-3, None, 100)
    assert small.optimizer.last_lr == 1e-4
    adam = small.optimizer.beta1, small.optimizer.beta2, small.optimizer.epsilon
    assert adam == (0.9, 0.99, 1e-8)
    assert (small.optimizer.weight_decay, small.optimizer.clip) == (0.1, 1.0)
    assert small.optimizer.schedule == "cosine"
    assert nano.loss == small.loss == LossSection(smoothing=0.0, z_loss=0.0)
    assert small.run.steps == 2000


def test_a_flag_wins_over_set_over_file_over_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[model]\nlayers = 5\nheads = 16\n[data]\nbatch = 5\n[run]\nsteps = 5\n")
    sets = ["data.batch=6", "run.steps=6", "run.steps = 7"]
    config = resolve("nano", file, sets, {"steps": "8", "seed": None})
    assert (config.model.width, config.model.layers, config.model.heads) == (32, 5, 16)
    assert (config.data.batch, config.run.steps, config.run.seed) == (6, 8, 0)


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1E-4", "1.0e-4"])
def test_a_rate_without_a_dot_is_a_number(text: str, tmp_path: Path) -> None:
    """Case L8."""
    file = tmp_path / "c.toml"
    file.write_text(f"[optimizer]\nlr = {text}\n")
    for config in (
        resolve(file=file),
        resolve(sets=[f"optimizer.lr={text}"]),
        resolve(flags={"lr": text}),
    ):
        assert config.optimizer.lr == 0.0001


def test_a_whole_number_may_stand_for_a_real_one(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[optimizer]\nlr = 1\n")
    lr = resolve(file=tmp_path / "c.toml").optimizer.lr
    assert (lr, type(lr)) == (1.0, float)


BAD_TOML = [
    ("optimizer.lr", '"1e-4"', "a finite number above 0; it is quoted text"),
    ("optimizer.lr", "inf", "a finite number above 0"),
    ("optimizer.lr", "nan", "a finite number above 0"),
    ("optimizer.lr", "-1", "a finite number above 0"),
    ("optimizer.lr", '"yes"', "a finite number above 0"),
    ("optimizer.lr", "true", "a finite number above 0"),
    ("optimizer.lr", "1" + "0" * 400, "a finite number above 0"),
    ("optimizer.clip", "0", 'a finite number above 0, or "none"'),
    ("optimizer.beta1", "1.0", "at least 0 and below 1"),
    ("optimizer.name", '"adam"', "one of adamw, sgd"),
    ("run.steps", "10.0", "a whole number of at least 1; write 10"),
    ("run.steps", '"10"', "a whole number of at least 1; it is quoted text"),
    ("run.steps", "0", "a whole number of at least 1"),
    ("data.batch", str(2**31), "a whole number of at least 1 and below 2^31"),
    ("run.steps", "1979-05-27", "a whole number of at least 1"),
    ("run.steps", "{a = 1}", "a whole number of at least 1"),
    ("data.path", '""', "text that UTF-8 can hold"),
]


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        resolve(**sources)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(("key", "value", "reason"), BAD_TOML)
def test_bad_values_in_a_file_are_refused(
    key: str, value: str, reason: str, tmp_path: Path
) -> None:
    """Case L8: key, value, source and reason in one line."""
    section, name = key.split(".")
    file = tmp_path / "c.toml"
    file.write_text(f"[{section}]\n{name} = {value}\n")
    message = refusal(file=file)
    assert message.startswith(f"--config {file}: {key} = ")
    assert reason in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.lr", text) for text in ("inf", "-inf", "nan", "-1", "yes", "", "none", "1,5")]
    + [("run.steps", text) for text in ("10.0", "1e3", "0", "-1", "ten")]
    + [
        ("run.dtype", "int8"),
        ("loss.smoothing", "1"),
        ("loss.smoothing", "-0.1"),
        ("loss.z_loss", "-1e-4"),
        ("loss.z_loss", "inf"),
        ("optimizer.schedule", "cosin"),
        ("data.path", ""),
        ("run.seed", "-1"),
        ("data.path", "x\udce4"),
        ("optimizer.clip", "off"),
    ],
)
def test_bad_values_on_the_command_line_are_refused(key: str, value: str) -> None:
    flag = OPTIONS[key].flag
    assert refusal(sets=[f"{key}={value}"]).startswith(f"--set: {key} = ")
    assert refusal(flags={flag: value}).startswith(f"--{flag.replace('_', '-')}: {key} = ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "sets nothing"),
        ("[optimizer]\nlr = 1\nlr = 2\n", "a key or section may be given once only"),
        ("[model]\n[model]\n", "a key or section may be given once only"),
        ("optimizer = [1, 2]\n", "optimizer must be a section, [optimizer] above"),
        ("lr = 1e-4\n", "unknown key 'lr'; did you mean optimizer.lr?"),
        ("[optimizer]\nwarmup_step = 3\n", "did you mean optimizer.warmup?"),
        ("[optimizer]\nweight-decay = 3\n", "did you mean optimizer.weight_decay?"),
        ("[model]\nlr = 3\n", "did you mean optimizer.lr?"),
        ("[optimzer]\nlr = 3\n", "unknown section [optimzer]; did you mean optimizer?"),
        ("[xyz]\nlr = 3\n", "there are model, mixture, data, loss, optimizer, run"),
        ("[run]\nxyz = 3\n", "unknown key 'run.xyz'"),
        ("- a\n- b\n", "is not a TOML file"),
    ],
)
def test_bad_files_are_refused(text: str, words: str, tmp_path: Path) -> None:
    """Case L9."""
    file = tmp_path / "c.toml"
    file.write_text(text)
    message = refusal(file=file)
    assert str(file) in message
    assert words in message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(file=tmp_path / "missing.toml")
    assert "cannot be read" in refusal(file=tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[data]\npath = '\xe4'\n")
    assert "is not a TOML file" in refusal(file=tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({"preset": "nanno"}, "--preset: unknown preset 'nanno'; did you mean nano?"),
        ({"preset": "x"}, "there are small, nano"),
        ({"sets": ["optimizer.lr"]}, "--set optimizer.lr has no value"),
        ({"sets": ["lr=1"]}, "--set: unknown key 'lr'; did you mean optimizer.lr?"),
        ({"sets": ["zzz=1"]}, "a key is section.name, such as model.family"),
        ({"flags": {"stesp": 1}}, "unknown flag 'stesp'; did you mean steps?"),
    ],
)
def test_unknown_names_are_refused(sources: dict[str, Any], words: str) -> None:
    assert words in refusal(**sources)


def test_every_conflict_is_listed_at_once() -> None:
    message = refusal(flags={"heads": 3, "min_lr": 1, "micro_batches": 13})
    for words in ("heads = 3; use a width such as 126", "lr = 0.001; lower", "use at most 12"):
        assert words in message


def test_a_configuration_made_in_python_is_checked_too() -> None:
    run = dataclasses.replace(RunConfig().run, steps=0, seed=1.5)
    with pytest.raises(ConfigError, match=r"run.steps = 0 must .*; run.seed = 1.5 must"):
        check(dataclasses.replace(RunConfig(), run=run))


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize(
    ("steps", "words"), [(100, "comes to its peak at the last step"), (99, "never comes to its")]
)
def test_a_warm_up_as_long_as_the_run_is_noted(schedule: str, steps: int, words: str) -> None:
    """And what is said of the learning rate is so, whatever the shape."""
    flags = {"schedule": schedule, "lr": 0.5}
    assert notes(resolve(flags=flags)) == []
    config = resolve(flags={**flags, "steps": steps})
    [note] = notes(config)
    assert f"the warm-up of 100 steps takes the whole run of {steps}: " in note
    assert words in note
    rates = [schedule_of(config).rate(k) for k in range(1, steps + 1)]
    assert (rates[-1] == 0.5) == ("never" not in words)
    assert max(rates) == rates[-1] <= 0.5


def test_the_shapes_are_those_that_there_are() -> None:
    assert OPTIONS["optimizer.schedule"].choices == tuple(SHAPES)


def test_two_fields_with_one_flag_are_a_mistake() -> None:
    @dataclasses.dataclass(frozen=True)
    class Twice:
        first: ModelSection
        second: ModelSection

    with pytest.raises(TypeError, match=r"first.family and second.family are both --family"):
        options_of(Twice)


def test_every_option_has_help_and_a_legal_default() -> None:
    assert len(OPTIONS) == 62
    for option in OPTIONS.values():
        assert option.help
        assert "\n" not in option.help
        assert option.check(option.default) == option.default
