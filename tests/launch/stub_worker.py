"""A rank for the launcher's tests: `python -m stub_worker MODE` behaves as MODE says, in milliseconds.

Every rank prints "ready RANK PID" once it can be signalled. Rank 1 is the one that fails.
"""

import os
import signal
import sys
import time

from rwkvclip_cli import console
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.launch.exit_record import exit_recorded

RANK = int(os.environ["RANK"])


def say(line: str) -> None:
    """Write a line in one piece: both ranks write to the same place."""
    os.write(1, f"{line}\n".encode())


def ready() -> None:
    say(f"ready {RANK} {os.getpid()}")


def sleep() -> None:
    ready()
    time.sleep(120)


def stop_on_request(*, obey: bool = True) -> None:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: asked.append(received))
    ready()
    while not (asked and obey):
        time.sleep(0.01)
    time.sleep(0.2 * RANK)
    say(f"saved {RANK} {signal.Signals(asked[0]).name}")
    console.say("stopped on request behind step 3; everything is in run")
    raise SystemExit(75)


def count_interrupts() -> None:
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda received, _: asked.append(received))
    say(f"terminal={sys.stderr.isatty()}")
    ready()
    while not asked:
        time.sleep(0.01)
    time.sleep(0.2)
    say(f"interrupts={len(asked)}")


def restart(mode: str) -> None:
    """Fail at first; then end well ("restart"), or worse without a word ("restart-killed")."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if RANK == 1:
            raise RwkvClipError("the disk is full", hint="df -h", exit_code=3)
        sleep()
    if mode == "restart-killed" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    say(f"again {RANK}")


def run(mode: str) -> None:
    if mode == "ok":
        say(f"stderr of {RANK} is {os.readlink('/proc/self/fd/2')}")
    elif mode == "graceful":
        stop_on_request()
    elif mode == "terminal":
        count_interrupts()
    elif mode == "stubborn":
        stop_on_request(obey=False)
    elif mode == "code" and RANK == 1:
        raise SystemExit(7)
    elif mode == "user" and RANK == 1:
        raise RwkvClipError("pairs.rec ends in the middle of a record", hint="rwkvclip pack", exit_code=3)
    elif mode == "saved":
        raise SystemExit(75)
    elif mode == "lost" and RANK == 1:
        raise RuntimeError("Read error [10.0.0.2]:4021: Connection reset by peer")
    elif mode == "bug" and RANK == 1:
        raise ValueError("a bug in the loss")
    elif mode == "killed" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode.startswith("restart"):
        restart(mode)
    else:
        sleep()


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "raw" and RANK == 1:
        raise ValueError("a bug before anything is recorded")
    if mode == "loose":  # tied to nobody
        sleep()
    with exit_recorded():
        run(mode)
