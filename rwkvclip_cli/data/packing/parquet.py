"""Parquet tables as sources, streamed in constant memory; what pictures and captions may be stored as.

>>> next(read_parquet("train-00000.parquet", SourceOptions())).captions
('a cat, sleeping',)

Images are bytes, structs of bytes and path (as Hugging Face's datasets writes them), or paths. Needs pyarrow.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rwkvclip_cli.console import UnableError, UsageError
from rwkvclip_cli.data.packing.samples import Item, Reject, SourceOptions, without_waiting
from rwkvclip_cli.data.packing.tables import SHOWN_CHARACTERS, Columns, find_columns, sample_of

SUFFIX = ".parquet"
MAGIC = b"PAR1"
HIDDEN = "._"  # Spark leaves a _SUCCESS beside the parts
BATCH_BYTES = 2**24
BATCH_ROWS = 1024
BUFFER_BYTES = 2**20
IMAGE_FIELDS = ("bytes", "path")


def is_parquet(path: str) -> bool:
    """Whether a file is one, by its suffix or its first bytes."""
    if path.lower().endswith(SUFFIX):
        return True
    try:
        with open(path, "rb", opener=without_waiting) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def parquet_files(path: str) -> list[str]:
    """A parquet file itself, or those of a folder in the order of their names' bytes."""
    if not os.path.isdir(path):
        return [path]
    names = sorted(os.listdir(path), key=os.fsencode)
    return [os.path.join(path, name) for name in names if name.lower().endswith(SUFFIX) and name[0] not in HIDDEN]


def is_all_parquet(folder: str) -> bool:
    """Whether a folder holds parquet files and nothing else: the parts of one table, as they are published."""
    try:
        names = [name for name in os.listdir(folder) if name[0] not in HIDDEN]
    except OSError:
        return False
    # A metadata.parquet alone is the table of an image folder that lost its images.
    return bool(names) and all(
        name.lower().endswith(SUFFIX) and not name.lower().startswith("metadata.") for name in names
    )


def parquet_columns(path: str, options: SourceOptions) -> Columns:
    """The columns of image and captions. UsageError where there are none, or none that can be such."""
    with _open(path) as file:
        return _columns(path, file.schema_arrow, options)


def count_rows(path: str) -> int:
    """The rows of a file, as its footer says."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def read_parquet(path: str, options: SourceOptions, behind: int = 0) -> Iterator[Item]:
    """Yield the rows `behind` the first so many in order; the first is row 1. Relative image paths start at the
    file's folder.

    The rows of a damaged row group are rejects, from the damage to the end of the group.
    """
    with _open(path) as file:
        columns = _columns(path, file.schema_arrow, options)
        row = 0
        for group in range(file.num_row_groups):
            end = row + file.metadata.row_group(group).num_rows
            if end <= behind:
                row = end
                continue
            batches = _batches(file, group, columns)
            fault = "the row group ends early"
            while row < end:
                try:
                    batch = next(batches, None)
                except _faults() as error:
                    fault = " ".join(str(error).split())[:SHOWN_CHARACTERS]
                    break
                if batch is None:
                    break
                for cells in _rows(batch):
                    row += 1
                    if row > behind:
                        yield sample_of(path, f"{path}:{row}", cells, options.image_key, options.caption_keys)
            for lost in range(max(row, behind) + 1, end + 1):
                yield Reject(f"{path}:{lost}", "bad-row", f"{path}:{lost}: damaged data: {fault}")
            row = end


def _batches(file: Any, group: int, columns: Columns) -> Iterator[Any]:
    """The wanted columns of a row group, few rows at a time where rows are large."""
    meta = file.metadata.row_group(group)
    row_bytes = meta.total_byte_size // max(1, meta.num_rows)
    at_once = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))
    names = list(dict.fromkeys((*columns.image, *columns.captions)))
    # A generator of its own, so that what the file refuses is raised where the first batch is asked for.
    yield from file.iter_batches(at_once, row_groups=[group], columns=names, use_threads=False)


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    names = list(dict.fromkeys(batch.schema.names))
    # The first of two columns with one name.
    columns = [_values(batch.column(batch.schema.names.index(name))) for name in names]
    return (dict(zip(names, cells, strict=True)) for cells in zip(*columns, strict=True))


def _values(column: Any) -> list[Any]:
    """A column as Python's values; where one of them has none, those that have."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    """A cell's value: a string of bytes that are no UTF-8 keeps them escaped, what Python cannot hold is None."""
    import pyarrow as pa

    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        if isinstance(scalar, pa.StructScalar):
            return {name: _value(item) for name, item in scalar.items()}
        if isinstance(scalar, pa.ListScalar):
            return [_value(item) for item in scalar.values]
        if isinstance(scalar, pa.StringScalar | pa.LargeStringScalar):
            return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
        if isinstance(scalar, pa.DictionaryScalar):
            return _value(scalar.value)
    return None


def _columns(path: str, schema: Any, options: SourceOptions) -> Columns:
    """The columns to read, of types that can hold a picture and captions."""
    types: dict[str, Any] = {}
    for field in schema:
        types.setdefault(field.name, field.type)
    columns = find_columns(path, list(types), options.image_key, options.caption_keys, not options.has_tokens)
    pictures = [name for name in columns.image if _can_be_image(types[name])]
    if not pictures:
        name = columns.image[0]
        raise UsageError(
            f"{path}: column {name!r} holds {types[name]}; an image column holds bytes, paths, or structs of both",
            "--image-key COLUMN",
        )
    for name in columns.captions:
        _check_tokens(path, name, types[name], options.context_length)
    return replace(columns, image=tuple(pictures))


def _can_be_image(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        return any(kind.field(at).name in IMAGE_FIELDS for at in range(kind.num_fields))
    if _is_list(kind):
        return types.is_uint8(kind.value_type) or _can_be_image(kind.value_type)
    strings: Sequence[Any] = (
        types.is_string, types.is_large_string, types.is_string_view,
        types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary,
    )  # fmt: skip
    return any(is_kind(kind) for is_kind in strings)


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _check_tokens(path: str, name: str, kind: Any, context_length: int) -> None:
    """Refuse a column whose every row holds numbers, but a number of them that fills no slots."""
    import pyarrow.types as types

    if not types.is_fixed_size_list(kind) or _is_list(kind.value_type):
        return
    if (types.is_integer(kind.value_type) or types.is_floating(kind.value_type)) and kind.list_size % context_length:
        raise UsageError(
            f"{path}: column {name!r} holds {kind.list_size} token ids a row, no whole number of slots of "
            f"{context_length}",
            "--context-length, or another --caption-key",
        )


@contextlib.contextmanager
def _open(path: str) -> Iterator[Any]:
    """The open file; UnableError without pyarrow, UsageError where it is no parquet table."""
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnableError(f"{path}: parquet tables need pyarrow", "pip install pyarrow") from error
    if not os.path.isfile(path):
        raise UsageError(f"{path}: not a regular file")
    with contextlib.ExitStack() as stack:
        try:
            # Opened here, because pyarrow takes no name that is not UTF-8.
            raw = stack.enter_context(open(path, "rb"))
            # Through a buffer: otherwise a whole column of a row group is read at once, whatever its size.
            file = pq.ParquetFile(raw, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
            stack.enter_context(file)
        except _faults() as error:
            words = " ".join(str(error).split())[:SHOWN_CHARACTERS]
            raise UsageError(f"{path}: not a readable parquet table ({words})") from error
        meta = file.metadata
        if sum(meta.row_group(group).num_rows for group in range(meta.num_row_groups)) != meta.num_rows:
            raise UsageError(
                f"{path}: not a readable parquet table (its row groups do not hold its {meta.num_rows} rows)"
            )
        yield file


def _faults() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
