"""The console script: commands that are imported only when they are asked for."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from minitrain.comm.mpi.launch import launched
from minitrain.errors import UserError
from minitrain.layout import did_you_mean

from . import output

# Name -> module of this package, function in it. What a command needs is imported by that module's
# functions when they run, so that no --help waits for NumPy.
COMMANDS = {
    "train": ("train", "train"),
    "verify": ("verify", "verify"),
    "show": ("show", "show"),
    "plan": ("plan", "plan"),
    "schedule": ("schedule", "schedule"),
    "trace": ("trace", "trace"),
    "generate": ("generate", "generate"),
    "eval": ("evaluate", "evaluate"),
    "runs": ("runs", "runs"),
    "compare": ("compare", "compare"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "convert": ("convert", "convert"),
    "doctor": ("doctor", "doctor"),
}


# What one process does: under a launcher that is the first, and the others have nothing to do.
ALONE = (
    *("show", "runs", "compare", "eval", "generate", "checkpoint", "convert", "trace", "doctor"),
)


class Commands(click.Group):
    """A group whose commands live in modules of their own, and whose errors are told apart here."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of COMMANDS."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command:
        """Import a command."""
        if name not in COMMANDS:
            near = did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no such command {name!r}{near}")
        module, function = COMMANDS[name]
        command: click.Command = getattr(
            importlib.import_module(f".{module}", __package__), function
        )
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run and exit.

        What its user can mend is one line on stderr and exit status 2; anything else that goes
        wrong is a fault of ours: its traceback, a line that says so, and exit status 3. A result
        that cannot be written to stdout is one line and exit status 2 too.
        """
        output.guard()
        try:
            self._enter(*args, **kwargs)
        except SystemExit as leave:
            if leave.code in (0, 1):
                sys.exit(output.final(leave.code))
            raise

    def _enter(self, args: Sequence[str] | None = None, **kwargs: Any) -> None:
        from minitrain.comm.mpi.job import end_together

        words = list(sys.argv[1:] if args is None else args)
        try:
            launched()
        except UserError as error:
            fail(str(error), 2)
        if not words or words[0] in ALONE or words[0].startswith("-"):
            if not output.first():
                sys.exit(0)
            self._run(words, **kwargs)
        with end_together():
            self._run(words, **kwargs)

    def _run(self, args: Sequence[str], **kwargs: Any) -> NoReturn:
        try:
            status = super().main(args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            fail(error.format_message(), error.exit_code)
        except UserError as error:
            fail(str(error), 2)
        except click.Abort:
            sys.exit(130)
        except Exception as error:
            _end(fault(error), 3)
        sys.exit(status if isinstance(status, int) else 0)


def fail(message: str, status: int) -> NoReturn:
    """Say what is wrong in one line, and exit."""
    _end(f"minitrain: {' '.join(message.split())}", status)


def fault(error: Exception) -> str:
    """What is said of an error that is none of the user's: the traceback, and whose it is."""
    trace = "".join(traceback.format_exception(error))
    return f"{trace}minitrain: this is a fault of minitrain; please report it with the lines above"


def _end(words: str, status: int) -> NoReturn:
    """Say why on stderr, and exit. Where all ranks fail, the first one speaks."""
    leave = SystemExit(status)
    if not output.first():
        leave.add_note(words)  # end_together prints it if this rank is the only one that fails
    output.say(words)
    raise leave


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="minitrain", message="minitrain %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train transformers under every parallel strategy, and prove each equal to one device."""
    if ctx.invoked_subcommand is None:
        output.tell(ctx.get_help())
