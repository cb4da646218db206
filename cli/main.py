"""The console script: commands that are imported only when they are asked for."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any, NoReturn

import click

from minitrain.comm.mpi.launch import launched
from minitrain.errors import UserError
from minitrain.layout import did_you_mean

# Name -> module of this package, function in it. What a command needs is imported by that module's
# functions when they run, so that no --help waits for NumPy.
COMMANDS = {
    "train": ("train", "train"),
    "verify": ("verify", "verify"),
    "plan": ("plan", "plan"),
    "schedule": ("schedule", "schedule"),
    "generate": ("generate", "generate"),
    "convert": ("convert", "convert"),
    "doctor": ("doctor", "doctor"),
}


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

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run and exit.

        What its user can mend is one line on stderr and exit status 2; anything else that goes
        wrong is a fault of ours: its traceback, a line that says so, and exit status 3.
        """
        from minitrain.comm.mpi.abort import end_together

        _open_closed_streams()
        with end_together():
            try:
                status = super().main(*args, **{**kwargs, "standalone_mode": False})
            except click.ClickException as error:
                fail(error.format_message(), error.exit_code)
            except UserError as error:
                fail(str(error), 2)
            except click.Abort:
                sys.exit(130)
            except Exception as error:
                _end(fault(error), 3)
            sys.exit(status if isinstance(status, int) else 0)


def _open_closed_streams() -> None:
    """What is written to a stream that the caller has closed (`2>&-`) goes nowhere.

    Its number must not stay free either: the next file that is opened would get it, and with it
    whatever a library prints.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def say(line: str) -> None:
    """A line on stderr, on the first rank alone; nobody need read it."""
    launch = launched()
    if launch is not None and launch.rank != 0:
        return
    try:
        click.echo(line, err=True)
    except RuntimeError:
        pass  # a signal handler's word while another one is being written
    except OSError:  # what reads has gone, and with it all that is still in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def tell(text: str) -> None:
    """A result, on stdout.

    Raises:
        UserError: what stdout is written to takes no more, such as a full disk.
    """
    try:
        click.echo(text)
    except BrokenPipeError:  # what reads has had enough; click ends the command then
        raise
    except OSError as error:
        raise UserError(f"cannot write to stdout: {error.strerror}") from error


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
    launch = launched()
    if launch is not None and launch.rank != 0:
        leave.add_note(words)  # end_together prints it if this rank is the only one that fails
    say(words)
    raise leave


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="minitrain", message="minitrain %(version)s")
def main() -> None:
    """Train transformers under every parallel strategy, and prove each equal to one device."""
