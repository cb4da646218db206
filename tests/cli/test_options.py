"""Flags come from the configuration's fields; a misspelt one is refused with the nearest."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner, Result

from minitrain.train.config.resolve import resolve
from minitrain_cli.main import main
from minitrain_cli.options import ConfigSources, config_options

# Growth of this list is a decision: every option must be wanted, used and documented.
FLAGS = """
    --preset --config --set
    --family --layers --heads --kv-heads --width --context --dropout
    --experts --top-k --expert-every --expert-hidden --shared-experts --router-scores --gates
    --capacity --router-scope --balance --router-z-loss --router-bias-rate
    --data --tokenizer --documents --batch --micro-batches --val-data --smoothing --z-loss
    --optimizer --lr --min-lr --warmup --schedule
    --beta1 --beta2 --epsilon --momentum --weight-decay --clip --freeze
    --steps --seed --dtype --recompute --stages --times --memory --instructions
    --eval-every --save-every --saving --keep --check-replicas --sample-every
    --sync --staleness --pull --staleness-rate --worker-times --worker-jitter
    --sync-every --outer-lr --outer-momentum
""".split()  # noqa: SIM905


@click.command()
@click.option("--loud", is_flag=True)
@config_options
def show(loud: bool, given: ConfigSources) -> None:
    """A command with an option of its own beside those of the configuration."""
    click.echo(f"{loud} {given.resolve()}")


def invoke(*args: str) -> Result:
    return CliRunner().invoke(show, args)


def test_the_flags_are_exactly_these() -> None:
    options = [option for option in show.params if isinstance(option, click.Option)]
    assert [option.opts[0] for option in options] == ["--loud", *FLAGS]
    assert all(option.help for option in options[1:])


def test_a_flag_wins_over_set_and_none_switches_off() -> None:
    args = ("--loud", "--preset", "nano", "--set", "optimizer.lr=0.5", "--lr", "1e-3")
    result = invoke(*args, "--clip", "none", "--weight-decay=0.25")
    expected = resolve("nano", flags={"lr": 1e-3, "clip": "none", "weight_decay": 0.25})
    assert result.output == f"True {expected}\n"
    assert expected.optimizer.clip is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--stesp", "3"], "--steps"),
        (["--weight_decay", "3"], "--weight-decay"),
        (["--lr", "nan"], "--lr: optimizer.lr = nan must be a finite number above 0"),
        (["--lr", "-1"], "--lr: optimizer.lr = -1.0"),
        (["--steps", "10.0"], "--steps: run.steps = '10.0' must be a whole number"),
        (["--set", "optimizer.warmup_step=1"], "did you mean optimizer.warmup?"),
        (["--preset", "nanno"], "nanno"),
        (["--config", "no-such.toml"], "no-such.toml cannot be read"),
        (["--heads", "3", "--min-lr", "1"], "model.heads = 3; use a width such as 126; optimizer"),
    ],
)
def test_bad_input_is_refused_with_exit_2(args: list[str], words: str) -> None:
    result = CliRunner().invoke(main, ["train", *args])
    assert result.exit_code == 2
    assert words in result.output


def test_help_shows_defaults_of_every_preset() -> None:
    text = " ".join(invoke("--help").output.split())
    assert "[128; nano: 32]" in text
    assert "--optimizer [adamw|sgd]" in text


def test_options_import_no_heavy_package() -> None:
    program = (
        "import sys, minitrain_cli.options; "
        "print([m for m in ('numpy', 'rich', 'mpi4py') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
