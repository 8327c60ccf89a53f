"""Why a run ended, from what the workers wrote down and what torchrun saw: the exit code and the words for it.

>>> judge(records, failures, torchrun_code=1, stop=None).exit_code
"""

import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rwkvclip_cli.console import EXIT_DONE, EXIT_FAILED, EXIT_SIGNAL, EXIT_STOPPED
from rwkvclip_cli.launch.exit_record import ExitRecord
from rwkvclip_cli.launch.explain import explain
from rwkvclip_cli.launch.torchrun_log import Failure, without_stacks

HARMLESS = (EXIT_DONE, EXIT_STOPPED)


@dataclass(frozen=True)
class Stop:
    """A stop that was asked for: the signal, the patience in seconds, and the ranks killed when it ended.

    `hurried`: a second Ctrl-C ended the patience.
    """

    signal: int
    grace_s: float
    killed: tuple[int, ...] = ()
    hurried: bool = False


@dataclass(frozen=True)
class Verdict:
    """The code to leave with, and what to tell: the message, the traceback under it, the next step.

    `elsewhere`: what is told only follows from what happened on another node.
    """

    exit_code: int
    message: str = ""
    traceback: str = ""
    hint: str = ""
    elsewhere: bool = False


def judge(
    records: Sequence[ExitRecord],
    failures: Sequence[Failure],
    torchrun_code: int,
    stop: Stop | None,
    torchrun_traceback: str = "",
    meeting: str = "",
) -> Verdict:
    """Decide how the run ended.

    `records` of the last attempt by time, `failures` with torchrun's first in front; `torchrun_code` as subprocess
    gives it, negative for a signal; `meeting` says who was to meet where, if several nodes were.
    """
    if stop is not None and stop.killed:
        ranks = ", ".join(str(rank) for rank in stop.killed)
        why = "at once, as asked" if stop.hurried else f"for not stopping within {stop.grace_s:g} s"
        hint = "" if stop.hurried else "a longer --stop-grace"
        return Verdict(EXIT_SIGNAL + stop.signal, f"killed {why}: rank {ranks}; unsaved steps are lost", hint=hint)
    if stop is not None and stop.signal == signal.SIGINT:
        return Verdict(EXIT_SIGNAL + signal.SIGINT, "interrupted")
    # torchrun's word that all ranks ended well is good: a failure that was written down is one that a restart mended.
    cause = None if torchrun_code == EXIT_DONE else _first_cause(records, failures, stop, torchrun_traceback)
    if cause is not None:
        return cause
    stopped = [record.rank for record in records if record.code == EXIT_STOPPED]
    if 0 in stopped:  # which has said itself that it stopped, and where everything is
        return Verdict(EXIT_STOPPED, "the same command continues")
    if stopped:
        return Verdict(EXIT_STOPPED, "stopped on request, everything saved", hint="the same command continues")
    if stop is not None and not failures and not records and torchrun_code != EXIT_DONE:
        return Verdict(EXIT_STOPPED, "stopped on request before any rank had started")
    if stop is not None and torchrun_code != EXIT_DONE:
        return Verdict(EXIT_SIGNAL + stop.signal, f"ended by {signal.Signals(stop.signal).name}")
    if torchrun_code == EXIT_DONE:
        return Verdict(EXIT_DONE)
    return _torchrun_failed(torchrun_code, torchrun_traceback, meeting)


def blame(records: Sequence[ExitRecord], traceback: str) -> Verdict:
    """Why an attempt failed that torchrun lets another one follow, from the same sources."""
    cause = _first_cause(records, (), None, traceback)
    return cause or Verdict(EXIT_FAILED, "a rank has failed and left no word why", traceback)


def _first_cause(
    records: Sequence[ExitRecord], failures: Sequence[Failure], stop: Stop | None, traceback: str
) -> Verdict | None:
    """The rank that failed first. One that a signal ended speaks last of all: it never got to write a record,
    while the others wrote theirs on losing it. SIGTERM is what torchrun itself ends the rest with.
    """
    recorded = {record.rank for record in records}
    sent = {signal.SIGTERM, signal.SIGINT if stop is None else stop.signal}
    silent = [failure for failure in failures if failure.rank not in recorded]
    deaths = [failure for failure in silent if failure.exit_code < 0 and -failure.exit_code not in sent]
    if deaths:
        # abort() follows a lost peer as often as a fault of its own.
        return _died(min(deaths, key=lambda death: -death.exit_code == signal.SIGABRT))
    failed = [record for record in records if record.code not in HARMLESS]
    # One that only says that it failed, such as a rank told so by another, is a poor witness; one that lost its
    # peer is the poorest.
    told = [_recorded(record) for record in sorted(failed, key=lambda record: not record.message)]
    told.sort(key=lambda verdict: verdict.elsewhere)
    codes = [failure for failure in silent if failure.exit_code > 0]
    if codes and all(verdict.elsewhere for verdict in told):
        where = f"rank {codes[0].rank} on {socket.gethostname()}"
        return _explained(codes[0].exit_code, f"{where} failed with exit code {codes[0].exit_code}", traceback, "")
    if told:
        return told[0]
    if silent and stop is None:
        return _died(silent[0])
    return None


def _recorded(record: ExitRecord) -> Verdict:
    where = f"rank {record.rank} on {record.host}"
    message = f"{where}: {without_stacks(record.message)}".rstrip()
    if not record.message:
        message = f"{where} failed with exit code {record.code}"
    return _explained(record.code, message, without_stacks(record.traceback), record.hint)


def _died(failure: Failure) -> Verdict:
    number = -failure.exit_code
    hint = "look in `dmesg` for the out-of-memory killer" if number == signal.SIGKILL else ""
    message = f"rank {failure.rank} on {socket.gethostname()} was ended by {_name(number)}"
    # SIGTERM is torchrun's own, and abort() what torch and NCCL do on losing a peer.
    elsewhere = number in (signal.SIGTERM, signal.SIGABRT)
    return Verdict(EXIT_SIGNAL + number, message, hint=hint, elsewhere=elsewhere)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _torchrun_failed(code: int, traceback: str, meeting: str) -> Verdict:
    if code < 0:
        return Verdict(EXIT_SIGNAL - code, f"torchrun was ended by {_name(-code)}")
    last = traceback.splitlines()[-1] if traceback else "it left no traceback"
    known = explain(traceback)
    message = f"torchrun failed before any rank did: {last}"
    if meeting:
        message = f"torchrun failed before {meeting} had met: {last}"
    return _explained(EXIT_FAILED, message, "" if known else traceback, "", traceback)


def _explained(code: int, message: str, traceback: str, hint: str, text: str = "") -> Verdict:
    known = explain(f"{message}\n{traceback}\n{text}")
    if known is None:
        return Verdict(code, message, traceback, hint)
    message += f"\n  cause: {known.cause}"
    return Verdict(code, message, traceback, hint or known.cure, known.elsewhere)
