"""Tables as sources: a .csv, .tsv or .jsonl file with a column of image paths and columns of captions.

>>> next(read_table("pairs.csv")).captions  # image,caption / cat.jpg,"a cat, sleeping"
('a cat, sleeping',)
"""

import ast
import codecs
import csv
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.packing.samples import (
    DEFAULT_CAPTION_KEYS,
    DEFAULT_IMAGE_KEYS,
    Item,
    Reject,
    Sample,
    captions_in,
    texts,
)

MAX_CELL_CHARACTERS = 2**27
SHOWN_CHARACTERS = 200


def check_table(path: str, image_key: str | None = None, caption_keys: Sequence[str] = ()) -> None:
    """Raise UsageError where a table lacks the columns; of a .jsonl, the first row has to hold them."""
    with _open_text(path) as lines:
        if _is_jsonl(path, lines):
            names = next((list(row) for row in map(_parse, _lines_of(lines)) if isinstance(row, dict)), [])
        else:
            names = _header(_csv_reader(path, lines))
    if not names:
        raise UsageError(f"{path}: no rows")
    _image_column(path, names, image_key)
    _caption_columns(path, names, caption_keys)


def read_table(path: str, image_key: str | None = None, caption_keys: Sequence[str] = ()) -> Iterator[Item]:
    """Yield the rows in order. Relative image paths start at the table's folder.

    By default the image is the first of DEFAULT_IMAGE_KEYS that is a column, the captions the first of
    DEFAULT_CAPTION_KEYS. A row that cannot be parsed is a reject that names its line.
    """
    with _open_text(path) as lines:
        if _is_jsonl(path, lines):
            yield from _read_jsonl(path, lines, image_key, caption_keys)
        else:
            yield from _read_csv(path, lines, image_key, caption_keys)


def _read_jsonl(path: str, lines: TextIO, image_key: str | None, caption_keys: Sequence[str]) -> Iterator[Item]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _parse(line)
        if not isinstance(row, dict):
            yield Reject(where, "bad-row", f"{where}: not a JSON object: {line.strip()[:SHOWN_CHARACTERS]}")
            continue
        keys = (image_key,) if image_key else DEFAULT_IMAGE_KEYS
        image = next((row[key] for key in keys if row.get(key) is not None), None)
        yield _sample(path, where, image, captions_in(row, caption_keys))


def _lines_of(lines: TextIO) -> Iterator[str]:
    return (line for line in lines if line.strip())


def _parse(line: str) -> Any:
    """The value of a JSON line, or None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _read_csv(path: str, lines: TextIO, image_key: str | None, caption_keys: Sequence[str]) -> Iterator[Item]:
    counted = _Lines(lines)
    reader = _csv_reader(path, counted)
    names = _header(reader)
    image_at = _image_column(path, names, image_key)
    captions_at = _caption_columns(path, names, caption_keys)
    # A cell of captions may spell a list only where nobody named the columns and this is the list's own.
    listed = not caption_keys and names[captions_at[0]].lower() == DEFAULT_CAPTION_KEYS[0]
    while True:
        first = reader.line_num + 1
        where = f"{path}:{first}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield Reject(where, "bad-row", f"{where}: {error}")
            continue
        if row is None:
            return
        if not row:
            continue
        fault = _fault(row, len(names), counted.ended, f"{first} to {reader.line_num}")
        if fault:
            yield Reject(where, "bad-row", f"{where}: {fault}")
            continue
        cells = row + [""] * (len(names) - len(row))
        captions = [text for at in captions_at for text in (_listed(cells[at]) if listed else texts(cells[at]))]
        yield _sample(path, where, cells[image_at], captions)


def _fault(row: list[str], columns: int, ended: bool, span: str) -> str:
    """Why a parsed row cannot be trusted, or nothing.

    A stray quote makes the csv module read on to the next quote, through any number of rows.
    """
    if ended:
        return f"a quote is opened and never closed: lines {span} are one cell"
    if any("\n" in cell and "\t" in cell for cell in row):
        return f"a quote swallows rows: lines {span} are one cell"
    extra = row[columns:]
    if any(cell.strip() for cell in extra):
        return f"{len(row)} cells under {columns} columns; quote cells that hold the delimiter"
    return ""


def _sample(path: str, where: str, image: Any, captions: list[str]) -> Sample | Reject:
    if not isinstance(image, str) or not image.strip():
        return Reject(where, "missing-image", f"{where}: the row names no image")
    source = f"{where}:{image[:SHOWN_CHARACTERS]}"
    if image.startswith(("http://", "https://")):
        return Reject(source, "missing-image", f"{source} is an address; download the images first (img2dataset)")
    return Sample(source, os.path.join(os.path.dirname(path), image), captions=tuple(captions))


def _listed(cell: str) -> list[str]:
    """The captions that a cell lists, as JSON or as Python prints a list; any other cell is one caption."""
    if cell.lstrip().startswith("["):
        for parse in (json.loads, ast.literal_eval):
            try:
                value = parse(cell.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(value, list):
                return texts(value)
    return texts(cell)


class _Lines:
    """The lines of a file, and whether its end was reached."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self.ended = False

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        try:
            return next(self._lines)
        except StopIteration:
            self.ended = True
            raise


def _csv_reader(path: str, lines: Iterable[str]) -> Any:
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    return csv.reader(lines, delimiter="\t" if path.lower().endswith(".tsv") else ",")


def _header(reader: Any) -> list[str]:
    try:
        return [name.strip() for name in next((row for row in reader if row), [])]
    except csv.Error:
        return []


def _image_column(path: str, names: list[str], key: str | None) -> int:
    if key is not None:
        return _column(path, names, key, "--image-key")
    at = _first_of(names, DEFAULT_IMAGE_KEYS)
    if at is None:
        raise UsageError(
            f"{path}: no image column among {_shown(names)}; looked for {', '.join(DEFAULT_IMAGE_KEYS)}",
            "--image-key COLUMN",
        )
    return at


def _caption_columns(path: str, names: list[str], keys: Sequence[str]) -> list[int]:
    if keys:
        return [_column(path, names, key, "--caption-key") for key in keys]
    at = _first_of(names, DEFAULT_CAPTION_KEYS)
    if at is None:
        raise UsageError(
            f"{path}: no caption column among {_shown(names)}; looked for {', '.join(DEFAULT_CAPTION_KEYS)}",
            "--caption-key COLUMN",
        )
    return [at]


def _column(path: str, names: list[str], key: str, option: str) -> int:
    if key in names:
        return names.index(key)
    near = difflib.get_close_matches(key, names, 1)
    raise UsageError(
        f"{path}: no column {key!r} among {_shown(names)}", f"{option} {near[0]}" if near else f"{option} COLUMN"
    )


def _first_of(names: list[str], keys: Sequence[str]) -> int | None:
    lowered = [name.lower() for name in names]
    return next((lowered.index(key) for key in keys if key in lowered), None)


def _shown(names: list[str]) -> str:
    return ", ".join(name[:40] for name in names[:12]) + (", ..." if len(names) > 12 else "")


def _is_jsonl(path: str, lines: TextIO) -> bool:
    """By suffix; where `--format table` names a file of another suffix, by its first character."""
    lowered = path.lower()
    if lowered.endswith((".jsonl", ".ndjson")):
        return True
    if lowered.endswith((".csv", ".tsv")):
        return False
    first = lines.read(1)
    lines.seek(0)
    return first == "{"


@contextmanager
def _open_text(path: str) -> Iterator[TextIO]:
    """The table as text with its line ends: UTF-8 or what its byte order mark says; other bytes stay escaped."""
    try:
        with open(path, "rb") as file:
            start = file.read(2)
        wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        text = open(  # noqa: SIM115 - closed below
            path,
            encoding="utf-16" if wide else "utf-8-sig",
            errors="replace" if wide else "surrogateescape",
            newline="" if not path.lower().endswith((".jsonl", ".ndjson")) else "\n",
        )
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    with text:
        yield text
