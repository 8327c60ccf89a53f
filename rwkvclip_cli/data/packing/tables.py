"""Tables as sources: a .csv, .tsv or .jsonl file with a column of image paths and columns of captions.

>>> next(read_table("pairs.csv")).captions  # image,caption / cat.jpg,"a cat, sleeping"
('a cat, sleeping',)
"""

import ast
import codecs
import csv
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.captions import START_ID
from rwkvclip_cli.data.packing.samples import (
    DEFAULT_CAPTION_KEYS,
    DEFAULT_IMAGE_KEYS,
    Item,
    Reject,
    Sample,
    captions_in,
    texts_or_tokens,
    usual_names,
)
from rwkvclip_cli.documents import parse_json

MAX_CELL_CHARACTERS = 2**27
SHOWN_CHARACTERS = 200
ADDRESS = re.compile("[A-Za-z][A-Za-z0-9+.-]+://")  # http://, s3://, but no drive of one letter

# A list of token ids as text: no caption of words begins so.
TOKENS = re.compile(rf"\s*\[\s*{START_ID}(\.0*)?\s*,")


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read, in order: of several, a row's first that holds something counts.

    are_named: the user named those of `captions`, and each fills slots.
    """

    image: tuple[str, ...]
    captions: tuple[str, ...]
    are_named: bool = False


def table_columns(
    path: str, image_key: str | None = None, caption_keys: Sequence[str] = (), needs_captions: bool = True
) -> Columns:
    """The columns that are read; UsageError where a table lacks them. Of a .jsonl, the first row has to hold them."""
    with _open_text(path) as lines:
        if _is_jsonl(path, lines):
            names = next((list(row) for row in map(_parse, _lines_of(lines)) if isinstance(row, dict)), [])
        else:
            names = _header(_csv_reader(path, lines))
    if not names:
        raise UsageError(f"{path}: no rows")
    return find_columns(path, names, image_key, caption_keys, needs_captions)


def find_columns(
    path: str, names: list[str], image_key: str | None, caption_keys: Sequence[str], needs_captions: bool = True
) -> Columns:
    """Those of `names` that the keys or, without them, the usual names choose; UsageError where there are none."""
    image = _choose(path, names, "image", "--image-key", [image_key] if image_key else [], DEFAULT_IMAGE_KEYS)
    if not needs_captions and not caption_keys:
        return Columns(image, tuple(usual_names(names, DEFAULT_CAPTION_KEYS)))
    captions = _choose(path, names, "caption", "--caption-key", caption_keys, DEFAULT_CAPTION_KEYS)
    return Columns(image, captions, bool(caption_keys))


def read_table(path: str, image_key: str | None = None, caption_keys: Sequence[str] = ()) -> Iterator[Item]:
    """Yield the rows in order. Relative image paths start at the table's folder.

    By default the image is the first of DEFAULT_IMAGE_KEYS that is a column, in any case, the captions the first of
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
        yield sample_of(path, where, row, image_key, caption_keys)


def _lines_of(lines: TextIO) -> Iterator[str]:
    return (line for line in lines if line.strip())


def _parse(line: str) -> Any:
    """The value of a JSON line, or None where it is none."""
    try:
        return parse_json(line)
    except ValueError:
        return None


def _read_csv(path: str, lines: TextIO, image_key: str | None, caption_keys: Sequence[str]) -> Iterator[Item]:
    counted = _Lines(lines)
    reader = _csv_reader(path, counted)
    names = _header(reader)
    columns = {name: names.index(name) for name in names}  # the first of two with one name
    # A cell of captions may spell a list only where nobody named the columns and this is the list's own.
    usual = () if caption_keys else usual_names(names, DEFAULT_CAPTION_KEYS)[:1]
    listed = [name for name in usual if name.lower() == DEFAULT_CAPTION_KEYS[0]]
    captions = [name for name in caption_keys or usual_names(names, DEFAULT_CAPTION_KEYS) if name in columns]
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
        fault = _fault(row, len(names), reader.dialect.delimiter, counted.ended, f"{first} to {reader.line_num}")
        if fault:
            yield Reject(where, "bad-row", f"{where}: {fault}")
            continue
        padded = row + [""] * (len(names) - len(row))
        cells: dict[str, Any] = {name: padded[at] for name, at in columns.items()}
        for name in captions:
            if name in listed or TOKENS.match(cells[name]):
                cells[name] = _listed(cells[name])
        yield sample_of(path, where, cells, image_key, caption_keys)


def _fault(row: list[str], columns: int, delimiter: str, ended: bool, span: str) -> str:
    """Why a parsed row cannot be trusted, or nothing.

    A stray quote makes the csv module read on to the next quote, through any number of rows. In a .tsv, where quotes
    are rare, tabs and line ends in one cell give that away; a .csv quotes such cells by right.
    """
    if ended:
        return f"a quote is opened and never closed: lines {span} are one cell"
    if delimiter == "\t" and any("\n" in cell and "\t" in cell for cell in row):
        return f"a quote swallows rows: lines {span} are one cell"
    extra = row[columns:]
    if any(cell.strip() for cell in extra):
        return f"{len(row)} cells under {columns} columns; quote cells that hold the delimiter"
    return ""


def sample_of(
    path: str, where: str, row: Mapping[str, Any], image_key: str | None, caption_keys: Sequence[str]
) -> Sample | Reject:
    """The sample of a row (name -> value) of the table `path`; `where` names the row for people."""
    names = [image_key] if image_key else usual_names(row, DEFAULT_IMAGE_KEYS)
    image, name = _image(next((row[name] for name in names if row.get(name) is not None), None))
    source = f"{where}:{name[:SHOWN_CHARACTERS]}" if name.strip() else where
    if image is None:
        return Reject(where, "missing-image", f"{where}: the row names no image")
    if isinstance(image, str):
        if ADDRESS.match(image):
            return Reject(source, "missing-image", f"{source} is an address; download the images first (img2dataset)")
        image = os.path.join(os.path.dirname(path), image)
    return Sample(source, image, tuple(captions_in(row, caption_keys, texts_or_tokens)))


def _image(value: Any) -> tuple[bytes | str | None, str]:
    """A cell's picture, as bytes or as a path, and its name; None where it holds none."""
    if isinstance(value, list) and value:
        if len(value) > 1 and all(isinstance(byte, int) and 0 <= byte < 256 for byte in value):
            return bytes(value), ""
        value = value[0]  # a list of pictures stands for its first
    name = ""
    if isinstance(value, Mapping):
        path = value.get("path")
        name = path if isinstance(path, str) else ""
        value = value["bytes"] if isinstance(value.get("bytes"), bytes) else name
    if isinstance(value, bytes):
        return value, name
    return (value, value) if isinstance(value, str) and value.strip() else (None, "")


def _listed(cell: str) -> Any:
    """The list that a cell spells, as JSON or as Python prints it; any other cell stays as it is."""
    if cell.lstrip().startswith("["):
        for parse in (parse_json, ast.literal_eval):
            try:
                value = parse(cell.strip())
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(value, list):
                return value
    return cell


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


def _choose(
    path: str, names: list[str], what: str, option: str, keys: Sequence[str], usual: Sequence[str]
) -> tuple[str, ...]:
    """`keys`, or without any those of `names` that are usual; UsageError where one is missing, or all are."""
    found = tuple(keys or usual_names(names, usual))
    if not found:
        close = next((near for name in usual for near in difflib.get_close_matches(name, names, 1, 0.8)), "COLUMN")
        raise UsageError(
            f"{path}: no {what} column among {_shown(names)}; looked for {', '.join(usual)}", f"{option} {close}"
        )
    for key in found:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"{option} {near[0]}" if near else f"{option} COLUMN"
            raise UsageError(f"{path}: no column {key!r} among {_shown(names)}", hint)
    return found


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
