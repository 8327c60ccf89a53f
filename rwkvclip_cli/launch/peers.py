"""What the launches of one job tell each other: who failed first, on which node. torchrun keeps that to the node.

>>> with peers_at(Endpoint("10.0.0.1", 29500), job="rwkvclip", hosting=False) as peers:
...     peers.tell(Cause(137, "rank 1 on node1 was ended by SIGKILL"))

Datagrams to the endpoint's own port, which torchrun uses for TCP alone: an address that every node knows already.
The launch at the endpoint answers each greeting with a token, so that nothing from an earlier job of that name
counts, and passes each node's last word on to the others. Where datagrams do not pass, nothing is said, and every
node tells what it saw itself.
"""

import contextlib
import json
import secrets
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rwkvclip_cli.documents import parse_json
from rwkvclip_cli.launch.network import Endpoint

GREET_EVERY_S = 1.0
TELL_EVERY_S = 0.2
TELL_S = 1.0  # how long to say one's last word to those who do not confirm it
LARGEST = 1 << 16
LONGEST_TEXT = 2000


@dataclass(frozen=True)
class Cause:
    """Why a node's ranks ended: the exit code for every node to leave with, what to tell, the next step."""

    exit_code: int
    message: str
    hint: str = ""


class Peers:
    """The launches on other nodes, as far as they have been heard. Nothing here waits, but for `tell` and `wait`."""

    def __init__(self, connection: socket.socket, job: str, hosting: bool) -> None:
        self.connection, self.job, self.hosting = connection, job, hosting
        self.token = secrets.token_hex(8) if hosting else ""
        self.known: set[Any] = set()  # addresses; without the endpoint's own launch, None is that one
        self.cause: Cause | None = None
        self.heard_s = 0.0  # when the cause came, on the monotonic clock
        self._greeted_s = float("-inf")
        self._unconfirmed: set[Any] = set()

    def fileno(self) -> int:
        """What to select on for `receive`."""
        return self.connection.fileno()

    def greet(self) -> None:
        """Say to the launch at the endpoint that this one is there, until it answers; call it now and then."""
        if not self.hosting and not self.known and time.monotonic() - self._greeted_s > GREET_EVERY_S:
            self._greeted_s = time.monotonic()
            self._send(None, "hello")

    def receive(self) -> None:
        """Take what has arrived."""
        while True:
            try:
                data, sender = self.connection.recvfrom(LARGEST)
            except ConnectionError:  # nobody listened there when something was sent
                continue
            except OSError:  # nothing more
                return
            with contextlib.suppress(ValueError, TypeError, KeyError):  # somebody else's datagram
                self._take(parse_json(data), sender if self.hosting else None)

    def tell(self, cause: Cause) -> None:
        """Tell every known launch why this node's ranks ended, and wait a moment for them to confirm it."""
        self._unconfirmed = set(self.known)
        end_s = time.monotonic() + TELL_S
        while self._unconfirmed and time.monotonic() < end_s:
            for peer in self._unconfirmed:
                self._send_cause(peer, cause)
            self._wait_for_data(TELL_EVERY_S)

    def wait(self, seconds: float) -> Cause | None:
        """The cause that another node told, waiting for it as long as there is anybody to tell it."""
        end_s = time.monotonic() + seconds
        while self.cause is None and self.known and time.monotonic() < end_s:
            self._wait_for_data(end_s - time.monotonic())
        return self.cause

    def _wait_for_data(self, seconds: float) -> None:
        if select.select([self.connection], [], [], max(0.0, seconds))[0]:
            self.receive()

    def _take(self, message: dict[str, Any], sender: Any) -> None:
        if message["job"] != self.job:
            return
        if message["kind"] == "hello" and self.hosting:
            self.known.add(sender)
            self._send(sender, "welcome")
        elif message["kind"] == "welcome" and not self.hosting:
            self.token = message["token"]
            self.known.add(sender)
        elif message["token"] == self.token and sender in self.known:
            if message["kind"] == "heard":
                self._unconfirmed.discard(sender)
            elif message["kind"] == "cause":
                cause = Cause(int(message["exit_code"]), str(message["message"]), str(message["hint"]))
                self._send(sender, "heard")
                self._hear(cause, sender)

    def _hear(self, cause: Cause, sender: Any) -> None:
        if self.cause is None:
            self.cause, self.heard_s = cause, time.monotonic()
            for peer in self.known - {sender}:
                self._send_cause(peer, cause)

    def _send_cause(self, peer: Any, cause: Cause) -> None:
        texts = {"message": cause.message[:LONGEST_TEXT], "hint": cause.hint[:LONGEST_TEXT]}
        self._send(peer, "cause", exit_code=cause.exit_code, **texts)

    def _send(self, peer: Any, kind: str, **content: Any) -> None:
        data = json.dumps({"job": self.job, "kind": kind, "token": self.token, **content}).encode()
        with contextlib.suppress(OSError):  # no route, or nobody listened before
            if peer is None:
                self.connection.send(data)
            else:
                self.connection.sendto(data, peer)


@contextlib.contextmanager
def peers_at(endpoint: Endpoint, *, job: str, hosting: bool) -> Iterator[Peers | None]:
    """The launches that meet at the endpoint, this one listening there if `hosting`; None where that cannot be."""
    try:
        connection = _listen(endpoint.port) if hosting else _connect(endpoint)
    except OSError:
        yield None
        return
    with connection:
        connection.setblocking(False)
        yield Peers(connection, job, hosting)


def _listen(port: int) -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", port))
    except OSError:
        listener.close()
        raise
    return listener


def _connect(endpoint: Endpoint) -> socket.socket:
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection
