"""Objects between two processes: over a socket, but for long bytes, which go through a file in memory that both have.

>>> Channel(here, shared).send([Sample("cat.jpg", jpeg, ("a cat",))])
>>> Channel(there, shared).receive()[0].image == jpeg
True

A socket takes a picture in many pieces and each end copies it twice more; the file takes it in one call.
"""

import io
import os
import pickle
import select
import socket
import struct
from typing import Any, BinaryIO

LONG_BYTES = 1 << 12
KEPT_BYTES = 1 << 22  # what the file may hold on to between messages

_SIZE = struct.Struct("<Q")  # of a message, before it


def open_in_memory(name: str) -> BinaryIO:
    """A file in memory where the system has that, so that a full disk does not matter; else a temporary one."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create(name), "w+b", buffering=0)
    import tempfile  # which loads much, nearly always for nothing

    return tempfile.TemporaryFile(buffering=0)


class Channel:
    """One end of a socket, and the file. Only one end may be sending, and the other has to receive before it sends.

    multiprocessing's own connections would do, but loading them is a tenth of a worker's start.
    """

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        self.connection = connection
        self._descriptor = descriptor

    def send(self, thing: object) -> None:
        """Send what can be pickled. Raises BrokenPipeError or ConnectionResetError where the other has gone."""
        message = io.BytesIO()
        _Pickler(message, self._descriptor).dump(thing)
        self.connection.sendall(_SIZE.pack(message.tell()))
        self.connection.sendall(message.getbuffer())

    def receive(self) -> Any:
        """Wait for the next thing. Raises EOFError or ConnectionResetError where the other has gone."""
        (size_bytes,) = _SIZE.unpack(self._receive_bytes(_SIZE.size))
        thing = _Unpickler(io.BytesIO(self._receive_bytes(size_bytes)), self._descriptor).load()
        if os.fstat(self._descriptor).st_size > KEPT_BYTES:
            os.ftruncate(self._descriptor, 0)
        return thing

    def has_word(self) -> bool:
        """Whether `receive` would not wait."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN)
        return bool(waiting.poll(0))

    def _receive_bytes(self, count: int) -> bytes:
        pieces = []
        while count:
            piece = self.connection.recv(count, socket.MSG_WAITALL)
            if not piece:
                raise EOFError
            pieces.append(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Pickler(pickle.Pickler):
    """Leaves long bytes out, after writing them to the file, one behind the other from its start."""

    def __init__(self, message: io.BytesIO, descriptor: int) -> None:
        super().__init__(message, pickle.HIGHEST_PROTOCOL)
        self._descriptor = descriptor
        self._end = 0

    def persistent_id(self, thing: Any) -> tuple[int, int] | None:
        if type(thing) is not bytes or len(thing) < LONG_BYTES:
            return None
        start = self._end
        while self._end < start + len(thing):  # a call takes at most 2 GiB
            self._end += os.pwrite(self._descriptor, memoryview(thing)[self._end - start :], self._end)
        return start, len(thing)


class _Unpickler(pickle.Unpickler):
    """Puts them back."""

    def __init__(self, message: io.BytesIO, descriptor: int) -> None:
        super().__init__(message)
        self._descriptor = descriptor

    def persistent_load(self, place: tuple[int, int]) -> bytes:
        start, size = place
        data = os.pread(self._descriptor, size, start)
        while len(data) < size:
            data += os.pread(self._descriptor, size - len(data), start + len(data))
        return data
