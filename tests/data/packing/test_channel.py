"""Objects arrive as they were sent, short and long bytes among them, and the file between the processes stays small."""

import os
import socket

import pytest

from rwkvclip_cli.data.packing.channel import KEPT_BYTES, LONG_BYTES, Channel, open_in_memory
from rwkvclip_cli.data.packing.samples import Sample


def test_what_is_sent_arrives_both_ways_however_long():
    here, there = socket.socketpair()
    with open_in_memory("test") as shared, here, there:
        ends = [Channel(here, shared.fileno()), Channel(there, shared.fileno())]
        for size in (0, LONG_BYTES - 1, LONG_BYTES, 300_000, 5):
            pictures = [os.urandom(size) for _ in range(3)]
            samples = [Sample(f"s{number}", picture, ("a", "b")) for number, picture in enumerate(pictures)]
            ends[0].send((samples, pictures[0]))
            assert ends[1].receive() == (samples, pictures[0])
            ends.reverse()


def test_long_bytes_do_not_go_through_the_socket_and_do_not_stay(monkeypatch):
    here, there = socket.socketpair()
    with open_in_memory("test") as shared, here, there:
        sender, receiver = Channel(here, shared.fileno()), Channel(there, shared.fileno())
        data = os.urandom(KEPT_BYTES + 1)
        sender.send([data])  # would wait for ever for a reader, were it in the socket
        assert os.fstat(shared.fileno()).st_size == len(data)
        assert receiver.receive() == [data]
        assert os.fstat(shared.fileno()).st_size == 0


def test_an_end_that_has_gone_is_an_error():
    here, there = socket.socketpair()
    with open_in_memory("test") as shared:
        there.close()
        with pytest.raises(EOFError):
            Channel(here, shared.fileno()).receive()
        here.close()
