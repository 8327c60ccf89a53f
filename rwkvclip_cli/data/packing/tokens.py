"""Captions that are token ids already: checked slot by slot, from a table's cells or the rows of a .npy file.

>>> token_slots((49406, 320, 2368, 49407, 0, 0), context_length=6)
[(49406, 320, 2368, 49407, 0, 0)]
"""

import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.captions import END_ID, START_ID, VOCAB_SIZE
from rwkvclip_cli.data.packing.samples import Ignored, Item, Reject, Sample, TokenIds

BLOCK_BYTES = 2**20
NARROW_FLOAT = "float16"  # holds whole numbers up to 2,048 alone

# Rejects behind which nobody knows how many samples were lost.
LOST_SAMPLES = frozenset({"damaged-tar", "unreadable-folder"})


class BadTokens(Exception):
    """Numbers that are no captions."""


def token_slots(numbers: TokenIds, context_length: int) -> list[tuple[int, ...]]:
    """The slots of `context_length` ids that `numbers` fill, those of zeros alone left out.

    The numbers may be whole floats. Raises BadTokens for what is no id, or for a part of a slot.
    """
    if len(numbers) % context_length:
        raise BadTokens(f"{len(numbers)} token ids fill no whole number of slots of {context_length}")
    try:
        ids = tuple(map(int, numbers))
        fits = min(ids, default=0) >= 0 and max(ids, default=0) < VOCAB_SIZE and ids == numbers
    except (TypeError, ValueError, OverflowError):  # null, NaN, infinity
        fits = False
    if not fits:
        at, number = next((at, number) for at, number in enumerate(numbers) if not _is_id(number))
        raise BadTokens(f"{number} at place {at} is no token id; they go from 0 to {VOCAB_SIZE - 1}")
    slots = [ids[start : start + context_length] for start in range(0, len(ids), context_length)]
    return [slot for slot in slots if any(slot)]


def _is_id(number: object) -> bool:
    return isinstance(number, int | float) and 0 <= number < VOCAB_SIZE and number == int(number)


def is_marked(slot: tuple[int, ...]) -> bool:
    """Whether a slot begins and ends as CLIP's tokenizer writes it: another tokenizer's ids do not."""
    return slot[0] == START_ID and END_ID in slot


@dataclass(frozen=True)
class TokenFile:
    """A .npy array of token ids: `rows` rows of `width` numbers from byte `offset` on, `dtype` as numpy spells it."""

    path: str
    rows: int
    width: int
    dtype: str
    offset: int


def open_tokens(path: str, context_length: int) -> TokenFile:
    """Read the head of a .npy file of shape (rows, slots x context_length) or (rows, slots, context_length).

    Raises UsageError for what is no such array.
    """
    import numpy as np

    if not os.path.isfile(path):
        raise UsageError(f"--tokens {path}: no such file", f"ls {shlex.quote(os.path.dirname(path) or '.')}")
    try:
        array: np.memmap[Any, Any] = np.lib.format.open_memmap(path, mode="r")  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UsageError(f"--tokens {path}: {error.strerror or error}") from error
    except Exception as error:  # a damaged head goes through Python's own parsers, which raise almost anything
        words = " ".join(str(error).split())[:200]
        raise UsageError(
            f"--tokens {path}: not a whole .npy array of numbers ({words})", "numpy.save(FILE, ids)"
        ) from None
    shape, dtype = array.shape, array.dtype
    wanted = f"(rows, {context_length} x slots)"
    if len(shape) not in (2, 3) or shape[-1] == 0 or shape[-1] % context_length:
        raise UsageError(
            f"--tokens {path}: shape {shape}; a row a sample with {context_length} ids a slot is {wanted}",
            "--context-length, if the slots are of another length",
        )
    if len(shape) == 3 and (shape[2] != context_length or shape[1] == 0):
        raise UsageError(f"--tokens {path}: shape {shape}; three axes are (rows, slots, {context_length})")
    if dtype.kind not in "iuf" or dtype.name == NARROW_FLOAT:
        raise UsageError(f"--tokens {path}: dtype {dtype}; token ids are integers, or floats that hold them")
    if dtype.kind in "iu" and np.iinfo(dtype).max < VOCAB_SIZE - 1:
        raise UsageError(f"--tokens {path}: dtype {dtype} does not hold ids up to {VOCAB_SIZE - 1}")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"--tokens {path}: stored column by column; rows are read one by one",
            "numpy.save(FILE, numpy.ascontiguousarray(ids))",
        )
    width = shape[1] * (shape[2] if len(shape) == 3 else 1)
    return TokenFile(path, shape[0], width, dtype.str, array.offset)


def read_tokens(tokens: TokenFile, behind: int = 0) -> Iterator[TokenIds]:
    """Yield the rows `behind` the first so many, in constant memory.

    RwkvClipError where the file has become shorter or unreadable.
    """
    import numpy as np

    dtype = np.dtype(tokens.dtype)
    row_bytes = tokens.width * dtype.itemsize
    at_once = max(1, BLOCK_BYTES // row_bytes)
    done = behind
    # Not mapped: a file cut while it is mapped kills the process that reads on.
    try:
        with open(tokens.path, "rb") as file:
            file.seek(tokens.offset + behind * row_bytes)
            while done < tokens.rows:
                count = min(at_once, tokens.rows - done)
                data = file.read(count * row_bytes)
                if len(data) < count * row_bytes:
                    raise RwkvClipError(f"--tokens {tokens.path}: ends before row {tokens.rows - 1}; it was cut")
                for row in np.frombuffer(data, dtype).reshape(count, tokens.width).tolist():
                    yield tuple(row)
                done += count
    except OSError as error:
        raise RwkvClipError(f"--tokens {tokens.path}: {error.strerror or error}") from error


def check_rows(tokens: TokenFile, samples: int) -> None:
    """Raise UsageError where the file has not a row for each sample: every caption behind would be another's."""
    if tokens.rows != samples:
        raise UsageError(_unequal(tokens, f"{samples:,}"))


def join_tokens(items: Iterable[Item], tokens: TokenFile, behind: int = 0) -> Iterator[Item]:
    """Put the row of each sample before its other captions; rejected samples use up their rows.

    The items are those `behind` the first so many samples.

    Raises RwkvClipError where rows and samples turn out unequal in number, or a damaged source has lost some.
    """
    rows = read_tokens(tokens, behind)
    samples = behind
    for item in items:
        if isinstance(item, Reject) and item.reason in LOST_SAMPLES:
            raise RwkvClipError(
                f"{item.message}; which row of --tokens {tokens.path} belongs to which sample cannot be known",
                "mend that source, or pack without --tokens",
            )
        if isinstance(item, Ignored) or (isinstance(item, Reject) and not item.is_sample):
            yield item
            continue
        row = next(rows, None)
        samples += 1
        if row is None:
            raise RwkvClipError(_unequal(tokens, "more"))
        yield replace(item, captions=(row, *item.captions)) if isinstance(item, Sample) else item
    if samples != tokens.rows:
        raise RwkvClipError(_unequal(tokens, f"{samples:,}"))


def _unequal(tokens: TokenFile, samples: str) -> str:
    return f"--tokens {tokens.path}: {tokens.rows:,} rows, but the sources hold {samples} samples; it is a row a sample"
