"""Read torchrun's stderr as it comes: pass lines on, hold back its failure report, learn from it who failed.

>>> log = TorchrunLog(); shown = log.feed(data); log.finish(); log.failures()
"""

import re
from dataclasses import dataclass

TRACEBACK = b"Traceback (most recent call last):"
# What torchrun logs on the way to its report; the verdict says it once.
REPORTING = re.compile(rb"torch/distributed/elastic/\S+\] .*(failed \(exitcode|closing signal)")
REPORT = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
# torch adds the C++ calls to some of its messages; they tell nothing to whoever starts a job.
STACK_HEAD = re.compile(r"Exception raised from .* \(most recent call first\):$")
STACK_LINE = re.compile(r"frame #\d+: |<omitting python frames>$|$")
FAILURE = re.compile(r"rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s*: (?P<code>-?\d+) \(pid: \d+\)")


@dataclass(frozen=True)
class Failure:
    """A worker of this node that torchrun saw fail; a negative exit code is the signal that ended it."""

    rank: int
    exit_code: int


class TorchrunLog:
    """What torchrun, and workers without a stderr of their own, have written so far."""

    def __init__(self) -> None:
        self._line = b""
        self._held: list[str] = []
        self._holding = False
        self._stacks = _Stacks()

    def feed(self, data: bytes) -> bytes:
        """Take what was read and return what to show now: whole lines up to the first traceback."""
        *lines, self._line = (self._line + data).split(b"\n")
        return b"".join(line + b"\n" for line in lines if self._passes(line))

    def finish(self) -> bytes:
        """Take the end of the stream and return what is left to show of an unfinished line."""
        line, self._line = self._line, b""
        return line + b"\n" if line and self._passes(line) else b""

    def _passes(self, line: bytes) -> bool:
        if self._stacks.hold(line.decode(errors="replace")):
            return False
        # A traceback here is somebody's last word, so holding the rest back delays nothing that matters.
        self._holding = self._holding or line.startswith(TRACEBACK)
        if REPORTING.search(line):
            return False
        if self._holding:
            self._held.append(line.decode(errors="replace"))
        return not self._holding

    def tracebacks(self) -> str:
        """What was held back, without torchrun's report of failed workers."""
        opening = TRACEBACK.decode()
        _, *found = "\n".join(self._held).split(opening)
        return "".join(opening + each for each in found if REPORT not in each).rstrip()

    def forget_tracebacks(self) -> None:
        """Let go of what was held back, but for torchrun's report: the ranks go on, and their lines pass again."""
        opening = TRACEBACK.decode()
        _, *found = "\n".join(self._held).split(opening)
        self._held = [line for each in found if REPORT in each for line in (opening + each).split("\n")]
        self._holding = bool(self._held)

    def failures(self) -> list[Failure]:
        """The workers in torchrun's report, the one it saw fail first in front."""
        found = [Failure(int(match["rank"]), int(match["code"])) for match in FAILURE.finditer("\n".join(self._held))]
        # The report ends with its root cause.
        return found[-1:] + found[:-1]


class _Stacks:
    """Tells the lines of C++ calls, with the empty one behind them, from all others, one after another."""

    def __init__(self) -> None:
        self._inside = False

    def hold(self, line: str) -> bool:
        self._inside = bool(STACK_HEAD.match(line) or (self._inside and STACK_LINE.match(line)))
        return self._inside


def without_stacks(text: str) -> str:
    """The text without the C++ calls that torch adds to some of its messages."""
    stacks = _Stacks()
    return "\n".join(line for line in text.split("\n") if not stacks.hold(line))
