"""The writers of `pack --writer`: our own RecordIO writer, and the real mxnet where it is installed. Same bytes.

>>> with open_writer("native", Path("out.rec"), Path("out.idx")) as writer:
...     writer.write(array("f", [49406, 49407]), jpeg, id=0)
"""

import importlib
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rwkvclip_cli.console import RwkvClipError, UnableError
from rwkvclip_cli.data.recordio import Record, RecordReader, RecordWriter, Written


class Writer(Protocol):
    """What `open_writer` gives: a context manager that appends records, which the index numbers from 0."""

    def write(self, labels: "array[float]", image: bytes, id: int) -> None:
        """Append a record: float32 token ids of all slots, then the JPEG. `id` goes into its header."""

    def flush(self) -> Written | None:
        """Wait until what there is is on the disk; how far that is, or None for a writer that cannot continue files."""

    def __enter__(self) -> Self:
        """Return the writer."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the files; RwkvClipError where the disk has not taken every byte."""


def open_writer(kind: str, rec: Path, idx: Path, after: Written | None = None) -> Writer:
    """Open the writer of that name on two files, to continue them `after` what its `flush` said.

    UnableError where mxnet cannot be imported.
    """
    return NativeWriter(rec, idx, after) if after else WRITERS[kind](rec, idx)


class NativeWriter:
    """Writes through `recordio.RecordWriter`."""

    def __init__(self, rec: Path, idx: Path, after: Written | None = None) -> None:
        self._writer = RecordWriter(rec, idx, after=after)

    def write(self, labels: "array[float]", image: bytes, id: int) -> None:
        """Append a record."""
        self._writer.write_record(Record(labels, image, id=id))

    def flush(self) -> Written:
        """Wait until all of it is on the disk."""
        return self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, traceback)


class MxnetWriter:
    """Writes through `mxnet.recordio.MXIndexedRecordIO`."""

    def __init__(self, rec: Path, idx: Path) -> None:
        self._recordio = _import_mxnet()
        self._writer = self._recordio.MXIndexedRecordIO(str(idx), str(rec), "w")
        self._rec, self._idx = rec, idx
        self._count = 0

    def write(self, labels: "array[float]", image: bytes, id: int) -> None:
        """Append a record."""
        import numpy as np

        header = self._recordio.IRHeader(0, np.frombuffer(labels, np.float32), id, 0)
        self._writer.write_idx(self._count, self._recordio.pack(header, image))
        self._count += 1

    def flush(self) -> None:
        """Nothing: mxnet writes its buffer out at the end alone, and only to files that it has made."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()
        if kind is None:
            self._check_whole()

    def _check_whole(self) -> None:
        """Read the last record back: mxnet loses buffered writes on a full disk without an error."""
        with RecordReader(self._rec, self._idx) as reader:
            if len(reader) != self._count:
                raise RwkvClipError(
                    f"mxnet wrote {len(reader):,} of {self._count:,} records to {self._rec}: is the disk full?",
                    f"df -h {self._rec.absolute().parent}",
                )
            if self._count:
                reader.record(self._count - 1)


def _import_mxnet() -> Any:
    try:
        return importlib.import_module("mxnet.recordio")
    except (ImportError, OSError, AttributeError) as error:  # old mxnet stumbles over new numpy and missing CUDA
        raise UnableError(
            f"--writer mxnet: mxnet cannot be imported here ({type(error).__name__}: {error})",
            'pip install "rwkvclip[mxnet]" with Python 3.11, or --writer native, which writes the same bytes',
        ) from error


WRITERS: dict[str, Callable[[Path, Path], Writer]] = {"native": NativeWriter, "mxnet": MxnetWriter}
