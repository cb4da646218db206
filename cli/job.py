"""`python -m minitrain_cli.job MPIEXEC ...`: what stands between a launcher and its user.

An mpiexec that cannot write to its terminal ends the job, as does one that gets a signal it does
not know, such as SIGHUP when that terminal goes away. It writes to this process instead, which
loses what nobody can read; and the ranks get a signal that every mpiexec passes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

from . import output

PASSED_ON = ("SIGINT", "SIGTERM", "SIGUSR1")
"""What mpiexec sends on to its ranks; other wishes to stop reach them as SIGTERM."""

AS_TERM = ("SIGHUP", "SIGUSR2", "SIGXCPU", "SIGQUIT")


def main(command: list[str]) -> int:
    """Run a launcher and return its status; 128 + n where a signal n ended its job."""
    output.guard()
    launcher = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,  # in the background it would be stopped for reading a terminal
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # the terminal's signals come once, from here
    )
    got = _pass_signals_on(launcher)
    pumps = [
        threading.Thread(target=_pump, args=ends)
        for ends in ((launcher.stdout, sys.stdout), (launcher.stderr, sys.stderr))
    ]
    for pump in pumps:
        pump.start()
    status = launcher.wait()
    for pump in pumps:
        pump.join()
    if status < 0:
        status = 128 - status
    if got and status == 128 + _sent(got[0]):
        status = 128 + got[0]
    return output.final(status)


def _pass_signals_on(launcher: subprocess.Popen[bytes]) -> list[int]:
    """Hand every wish to stop to the launcher; the list of those that have come, as they come."""
    got: list[int] = []

    def handle(number: int, frame: object) -> None:
        if not got or _sent(number) == number:  # a second SIGTERM would end it at once
            launcher.send_signal(_sent(number))
        got.append(number)

    for name in (*PASSED_ON, *AS_TERM):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)
    return got


def _sent(number: int) -> int:
    return signal.SIGTERM if signal.Signals(number).name in AS_TERM else number


def _pump(source: Any, stream: Any) -> None:
    while piece := os.read(source.fileno(), 1 << 16):
        stream.buffer.write(piece)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
