"""Two hosts on this machine, alpha and beta, that see each other alone: namespaces joined by a virtual cable.

>>> with two_hosts(folder) as (alpha, beta):
...     alpha.start("nccl-check", "--backend", "gloo", "--cpus", "1").end()

A host has its own network, name, /etc/hosts, shared memory and process numbers, and this machine's files, as hosts
with a common file system have. Nothing is named outside, so any number of pairs can stand side by side. A host lives
as long as its first process, which reads a pipe from here: however this process ends, the kernel ends the host and
all that runs on it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import plain_environment

ADDRESSES = {"alpha": "10.77.0.1", "beta": "10.77.0.2"}
NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
PATIENCE_S = 120.0  # for what takes seconds
SETTLING_S = 10.0  # for what the kernel does at once, on a busy machine
CABLE = "cable0"
BOOT = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /etc/nsswitch.conf && ip link set lo up &&
echo up && exec cat
"""


class Command:
    """A `rwkvclip` command on a host; what it writes goes to files, so that it never waits for a reader."""

    def __init__(self, host: "Host", argv: list[str], out: Path, env: dict[str, str] | None) -> None:
        self.host, self.out, self.err = host, out.with_suffix(".out"), out.with_suffix(".err")
        with self.out.open("w") as stdout, self.err.open("w") as stderr:
            self.entering = subprocess.Popen(
                [*host.enter, *argv],
                env=plain_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    @property
    def pid(self) -> int:
        """The command's own process: the child of what entered the namespaces for it."""
        return _child_of(self.entering.pid)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the command has written the text so many times."""
        end_s = time.monotonic() + PATIENCE_S
        while (self.out.read_text() + self.err.read_text()).count(text) < count:
            assert time.monotonic() < end_s, f"no {text!r} from {self}"
            assert self.entering.poll() is None, f"{self} has ended"
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) once the command has ended."""
        try:
            code = self.entering.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running: {self}")
        return code, self.out.read_text(), self.err.read_text()

    def __str__(self) -> str:
        return f"command on {self.host.name}\nstdout: {self.out.read_text()}\nstderr: {self.err.read_text()}"


class Host:
    """One host: where commands are started and processes counted."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.commands = name, folder, 0
        self.address = ADDRESSES[name]
        names, switch = folder / f"{name}.hosts", folder / f"{name}.nsswitch"
        others = "".join(f"{address} {other}\n" for other, address in ADDRESSES.items() if other != name)
        # As Debian's installer writes it: the own name leads to no interface.
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        switch.write_text("hosts: files\n")  # there is no name server on the cable
        apart = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        self._unshare = subprocess.Popen(
            [*apart, "sh", "-c", BOOT, "sh", name, names, switch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "up\n":
            _, said = self._unshare.communicate(timeout=SETTLING_S)
            pytest.skip(f"this machine lets root make no namespaces: {said.strip()}")
        self.init = _child_of(self._unshare.pid)
        self.enter = ["nsenter", "--target", str(self.init), *NAMESPACES, "--"]

    def start(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Command:
        """Start `rwkvclip ARGUMENTS` here."""
        return self.start_program(sys.executable, "-m", "rwkvclip_cli", *arguments, env=env)

    def start_program(self, *argv: str | Path, env: dict[str, str] | None = None) -> Command:
        """Start any program here."""
        self.commands += 1
        return Command(self, [str(word) for word in argv], self.folder / f"{self.name}-{self.commands}", env)

    def processes(self) -> dict[int, str]:
        """{process: its command line} of all that runs here, but for what keeps the host alive."""
        inside = os.readlink(f"/proc/{self.init}/ns/pid")
        found = {}
        for pid, _, state in _processes():
            with contextlib.suppress(OSError):  # it ended meanwhile
                # The dead stay listed: the first process of this host is none that would wait for orphans.
                if state != "Z" and pid != self.init and os.readlink(f"/proc/{pid}/ns/pid") == inside:
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        return found

    def connect(self, other: "Host") -> None:
        """Lay the cable to the other host."""
        # Of all namespaces only the network's: the number of the other host's process is one of out here.
        inside = ["nsenter", "--target", str(self.init), "--net", "--"]
        lay = ["ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(other.init)]
        subprocess.run([*inside, *lay], check=True)
        for host in (self, other):
            subprocess.run([*host.enter, "ip", "address", "add", f"{host.address}/24", "dev", CABLE], check=True)
            subprocess.run([*host.enter, "ip", "link", "set", CABLE, "up"], check=True)

    def end(self) -> None:
        """End the host: the kernel kills whatever runs on it with its first process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._unshare.communicate(timeout=SETTLING_S)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Alpha (10.77.0.1) and beta (10.77.0.2); their files go to `folder`, and nothing is left of them at the end."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for name in ADDRESSES:
            hosts.append(Host(name, folder))
            stack.callback(hosts[-1].end)
        alpha, beta = hosts
        alpha.connect(beta)
        yield alpha, beta


def _child_of(process: int) -> int:
    """The one child of a process, which it may still be about to make."""
    end_s = time.monotonic() + SETTLING_S
    while time.monotonic() < end_s:
        for pid, parent, _ in _processes():
            if parent == process:
                return pid
        time.sleep(0.02)
    pytest.fail(f"process {process} has no child")


def _processes() -> Iterator[tuple[int, int, str]]:
    """(process, its parent, its state) of every process of this machine."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                yield int(entry), int(parent), state
