"""Addresses, endpoints and ports of this machine, without a tool to call: what a rendezvous depends on.

>>> parse_endpoint("10.0.0.1:29500")
Endpoint(host='10.0.0.1', port=29500)
"""

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import struct
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkvclip_cli.console import UsageError

DEFAULT_PORT = 29500  # torchrun's own, for static rendezvous
TCP_LISTEN = "0A"  # the state column of /proc/net/tcp: TCP_LISTEN of the kernel's tcp_states.h
DOCUMENTATION_ADDRESS = "192.0.2.1"  # TEST-NET-1 (RFC 5737): routed like the outer world, owned by nobody
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
# What a client of torch's TCPStore says first: the queries VALIDATE, with the magic number, and PING, with a number
# that the store sends back (TCPStoreBackend.hpp, the same since torch 2.3).
STORE_VALIDATE, STORE_MAGIC, STORE_PING = 0, 0x3C85F7CE, 13
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes meet: a host name or address (IPv6 without brackets) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class PortOwner:
    """The process that listens on a port; `pid` is None where another user's process hides."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})" if self.pid else "a process of another user"


def parse_endpoint(text: str) -> Endpoint:
    """Read host:port or [IPv6]:port; UsageError says what is wrong with anything else."""
    wrong = UsageError(
        f"--rdzv-endpoint is host:port of node 0; got {text!r}", f"--rdzv-endpoint {_example_of(text)}:{DEFAULT_PORT}"
    )
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+)):(\d{1,5})", text.strip())
    if match is None:
        raise wrong
    host, port = match.group(1) or match.group(2), int(match.group(3))
    if port > 65535:
        raise wrong
    return Endpoint(host, port)


def _example_of(text: str) -> str:
    host = text.strip().rpartition("://")[2].partition(":")[0]
    return host if re.fullmatch(r"[\w.-]+", host) else "HOST"


def resolve(host: str) -> list[str]:
    """The host's addresses in the resolver's order; empty where the name is unknown."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Whether a numeric address never leaves this machine (127.0.0.0/8, ::1, and the wildcards)."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


def source_address(target: str) -> str | None:
    """The own address that packets to `target` would carry, as `ip route get` says; None without a route.

    Connecting a datagram socket picks the route and sends nothing.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, DEFAULT_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def main_address() -> str | None:
    """This machine's address towards the world, else any that is not loopback, else None."""
    routed = source_address(DOCUMENTATION_ADDRESS)
    if routed and not is_loopback(routed):
        return routed
    return next((address for address in own_addresses() if not is_loopback(address)), None)


def towards(host: Sequence[str], own: dict[str, str]) -> tuple[str | None, bool]:
    """(own address that reaches a host, whether the host is this machine), from the addresses of both."""
    here = [address for address in host if address in own or is_loopback(address)]
    outer = [address for address in here if not is_loopback(address)]
    if outer:
        return outer[0], True
    if here:  # what Debian's /etc/hosts says of the own name
        return main_address() or here[0], True
    routed = source_address(host[0]) if host else None
    return routed or main_address(), False


def steer_gloo(environ: MutableMapping[str, str]) -> None:
    """Name gloo the interface that reaches MASTER_ADDR, where it would listen on none that other nodes reach.

    gloo listens on what the host name resolves to, which Debian's /etc/hosts makes 127.0.1.1. A choice that is in
    `environ` already stays, and one machine alone needs none.
    """
    master = environ.get("MASTER_ADDR", "localhost")
    if GLOO_INTERFACE_VARIABLE in environ or master == "localhost" or is_loopback(master):
        return
    own = own_addresses()
    named = resolve(socket.gethostname())
    if named and named[0] in own and not is_loopback(named[0]):
        return
    address, _ = towards(resolve(master), own)
    interface = own.get(address) if address else None
    if interface:
        environ[GLOO_INTERFACE_VARIABLE] = interface


def is_foreign(endpoint: Endpoint) -> bool:
    """Whether a program answers at the endpoint that is no rendezvous of torch's, or never answers at all.

    torch itself waits for such a program's answer without end. Where nobody listens, or the connection is closed
    (as proxies do for somebody who does not listen yet), torch tries again, and this is False.
    """
    nonce = struct.pack("<I", os.getpid())
    greeting = struct.pack("<BIB", STORE_VALIDATE, STORE_MAGIC, STORE_PING) + nonce
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), CONNECT_TIMEOUT_S)
    except OSError:
        return False
    with connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        try:
            connection.sendall(greeting)
            return connection.recv(len(nonce)) not in (nonce, b"")
        except TimeoutError:
            return True
        except OSError:
            return False


def own_addresses() -> dict[str, str]:
    """{address: interface} of every address of this machine, IPv4 before IPv6, loopback included."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        return {}
    found: list[tuple[int, str, str]] = []
    try:
        entry = head
        while entry:
            item = entry.contents
            if item.address:
                family = ctypes.cast(item.address, ctypes.POINTER(ctypes.c_ushort)).contents.value
                text = _address_text(family, item.address)
                if text is not None:
                    found.append((family, text, os.fsdecode(item.name)))
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return {text: name for _, text, name in sorted(found, key=lambda each: each[0])}


class _InterfaceAddress(ctypes.Structure):
    """The leading fields of `struct ifaddrs` (getifaddrs(3))."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _address_text(family: int, pointer: int) -> str | None:
    # sockaddr_in: family, port, then 4 bytes; sockaddr_in6: family, port, flow label, then 16 bytes.
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(pointer + 8, 16))
    return None


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_owner(port: int, proc: Path = Path("/proc")) -> PortOwner | None:
    """Who listens on the TCP port, on whatever address; None if nobody does."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(proc / "net" / table, port)}
    if not inodes:
        return None
    for folder in proc.iterdir():
        if folder.name.isdigit() and inodes & _socket_inodes(folder / "fd"):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            return PortOwner(int(folder.name), command[:120])
    return PortOwner(None, "")


def _listening_inodes(table: Path, port: int) -> set[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {row[9] for row in rows if row[3] == TCP_LISTEN and int(row[1].rpartition(":")[2], 16) == port}


def _socket_inodes(folder: Path) -> set[str]:
    try:
        descriptors = list(folder.iterdir())
    except OSError:  # another user's process, or one that ended meanwhile
        return set()
    found: set[str] = set()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                found.add(match.group(1))
    return found
