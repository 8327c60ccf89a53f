"""Captions to token ids, exactly as OpenAI's published CLIP tokenizer gives them, text cleaning included.

>>> Tokenizer().encode("a photo of a cat")
[320, 1125, 539, 320, 2368]

The text is repaired (ftfy), unescaped twice, its white space collapsed, lower-cased and split into words; the bytes of
each word are merged in the order of a published table. Source: github.com/openai/CLIP, clip/simple_tokenizer.py.
"""

import functools
import gzip
import hashlib
import html
import io
import itertools
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import add
from pathlib import Path

CONTEXT_LENGTH = 77
START_TEXT, END_TEXT = "<|startoftext|>", "<|endoftext|>"
START_ID, END_ID = 49406, 49407
VOCAB_SIZE = 49408

MERGES_FILE = "bpe_simple_vocab_16e6.txt.gz"
MERGES_BYTES = 1 << 20  # of its text, in which that many merges are
MERGE_COUNT = 49152 - 256 - 2  # the table goes on, but CLIP stops here
END_OF_WORD = "</w>"
WORDS = (
    rf"{re.escape(START_TEXT)}|{re.escape(END_TEXT)}"
    r"|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
)

# ftfy and HTML unescaping leave such text alone: no entity, nothing outside printable ASCII and common white space.
_PLAIN = re.compile(r"[\t\n\r -%'-~]*")
# Of such text ftfy changes no character by itself but the curly quotes: it holds no entity, control character,
# surrogate, ligature, wide or narrow form, and no line break but one.
_CALM = re.compile(
    r"[\t\n -%'-~\u00a0-\u0131\u0134-\u0148\u014a-\u01c3\u01cd-\u01f0\u01f4-\u2027\u202a-\u2069\u2070-\u2fff"
    r"\u3001-\ud7ff\ue000-\ufaff\U00010000-\U0010ffff]*"
)
_CURLY = re.compile(r"[\u02bc\u2018-\u201f]")
MAX_CALM = 10**6  # ftfy cuts longer lines

# What remembered chunks may take, and what each costs besides its letters and ids; about, in bytes.
_CACHE_BYTES = 1 << 25
_CHUNK_BYTES = 160
_BYTE_PIECES = 512  # a byte inside a word and at its end; the merged pieces follow in the order of their ranks


class Tokenizer:
    """OpenAI CLIP's byte-pair tokenizer. Costs nothing to make or pickle: each process loads the table at first use."""

    name = "openai-clip-bpe"

    @property
    def hash(self) -> str:
        """SHA-256 of the merges file, as published, in hexadecimal."""
        return hashlib.sha256(_merges_file()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without start and end. Special tokens spelled in the text become their ids, as published.

        Any string will do: lone surrogates, control characters and mojibake are repaired or become U+FFFD.
        """
        chunks = _table()
        # No word spans white space, so the words of a text are those of its chunks, however wide the gaps.
        return list(itertools.chain.from_iterable(map(chunks.__getitem__, _repair(text).lower().split())))

    def tokenize(self, text: str, context_length: int = CONTEXT_LENGTH) -> list[int]:
        """`context_length` ids: start, text, end, zeros. A longer text is cut and the last id is still the end."""
        ids = _marked(self.encode(text), context_length)
        return ids + [0] * (context_length - len(ids))

    def fill_slots(
        self, captions: Sequence[str | Sequence[int]], slots: int, context_length: int = CONTEXT_LENGTH
    ) -> tuple["array[float]", int]:
        """The `slots * context_length` ids of a record, as its label holds them, and how many of its captions were cut.

        A caption that is ids already, `context_length` of them, is taken as it is. Fewer captions than slots repeat in
        order (a, b fill three slots as a, b, a); captions beyond are left out. Raises ValueError without any caption.
        """
        if not captions:
            raise ValueError("a record needs at least one caption")
        rows: list[bytes] = []
        cut = 0
        for caption in captions[:slots]:
            if isinstance(caption, str):
                ids = self.encode(caption)
                cut += len(ids) + 2 > context_length
                # Most of a slot is padding: made as bytes, not number by number.
                rows.append(array("f", _marked(ids, context_length)).tobytes().ljust(4 * context_length, b"\0"))
            else:
                rows.append(array("f", caption).tobytes())
        labels = array("f")
        labels.frombytes(b"".join(itertools.islice(itertools.cycle(rows), slots)))
        return labels, cut

    def decode(self, ids: Iterable[float]) -> str:
        """The cleaned text of `ids`, which may be a slot of a record: start, end and padding are left out.

        Raises ValueError for a number that is no token id.
        """
        return _decode(ids)


def _marked(ids: list[int], context_length: int) -> list[int]:
    """Start, as many of `ids` as there is room for, end."""
    return [START_ID, *ids[: context_length - 2], END_ID]


def _decode(ids: Iterable[float]) -> str:
    pieces = _pieces()
    tokens = [int(number) for number in ids]
    if tokens and tokens[0] == START_ID:
        tokens = tokens[1:]
    padded = len(tokens)
    while padded and tokens[padded - 1] == 0:
        padded -= 1
    # Zero is also the id of "!", so zeros are padding only behind the end.
    if padded and tokens[padded - 1] == END_ID:
        tokens = tokens[: padded - 1]
    for token in tokens:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"{token} is no token id; they go from 0 to {VOCAB_SIZE - 1}")
    return b"".join([pieces[token] for token in tokens]).decode("utf-8", errors="replace").rstrip(" ")


def clean_text(text: str) -> str:
    """`text` as the tokenizer sees it: repaired, unescaped twice, white space collapsed, lower case."""
    return " ".join(_repair(text).split()).lower()


def _repair(text: str) -> str:
    # The first condition is the second for most text, three times as fast.
    if (text.isascii() and text.isprintable() and "&" not in text) or _PLAIN.fullmatch(text):
        return text
    if _CALM.fullmatch(text) and (straight := _straighten(text)) is not None:
        return straight
    return _repair_thoroughly(text)


def _repair_thoroughly(text: str) -> str:
    """As published; `_repair` does the same with less work."""
    import ftfy

    return _unescape(_unescape(ftfy.fix_text(text)))


def _straighten(text: str) -> str | None:
    """What ftfy makes of calm text in which it sees no mojibake, before and after it straightens the quotes.

    None where it might do more: then its other steps have to run.
    """
    from ftfy.badness import is_bad

    straight = text
    if _CURLY.search(text):
        from ftfy.fixes import uncurl_quotes

        straight = uncurl_quotes(text)
    if not unicodedata.is_normalized("NFC", straight):
        return None
    for state in {text, straight}:
        # ftfy looks at each line alone, and sees no mojibake in ASCII.
        lines = state.splitlines(keepends=True)
        if any(len(line) > MAX_CALM or (not line.isascii() and is_bad(line)) for line in lines):
            return None
    return straight


def _unescape(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:
        # Python refuses to read numbers of thousands of digits; no character has one beyond seven.
        text = re.sub("&#0+(?=[0-9])", "&#", text)
        return html.unescape(re.sub("&#[0-9]{8,};?", "\ufffd", text))


def clean_captions(captions: Iterable[str | None]) -> list[str]:
    """The captions that say something: those of white space and NUL alone, or None, are left out."""
    return [caption for caption in captions if caption is not None and caption.replace("\0", " ").strip()]


def decode_caption_bytes(data: bytes) -> str:
    """The text of a caption file whose encoding nobody names. Never raises.

    A byte order mark decides (UTF-8, UTF-16, UTF-32) and is removed; then UTF-8, if valid; UTF-16 without a mark where
    every other byte is mostly zero; CESU-8 and Java's UTF-8; and last Windows-1252, which reads Latin-1 too. Other
    legacy encodings cannot be told apart in so short a text: convert such files first (`iconv -f gb18030 -t utf-8`).
    """
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding, errors="replace")
    wide = _utf16_without_mark(data)
    if wide:
        return data.decode(wide, errors="replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        import ftfy.bad_codecs  # noqa: F401 - registers the two codecs below

        try:
            return data.decode("utf-8-variants")
        except UnicodeDecodeError:
            return data.decode("sloppy-windows-1252")


# UTF-32 first: its little-endian mark starts with UTF-16's.
_BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)


def _utf16_without_mark(data: bytes) -> str | None:
    if b"\0" not in data:
        return None
    even, odd = data[0::2].count(0), data[1::2].count(0)
    if len(data) % 2 or len(data) < 4 or (even and odd):
        return None
    half = len(data) // 4
    if odd > half:
        return "utf-16-le"
    return "utf-16-be" if even > half else None


class _Chunks(dict[str, tuple[int, ...]]):
    """Chunk of text without white space -> ids; those seen before are looked up."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._encode = encode
        self._size_bytes = 0

    def __missing__(self, chunk: str) -> tuple[int, ...]:
        ids = self._encode(chunk)
        size_bytes = _CHUNK_BYTES + len(chunk) + 8 * len(ids)
        if self._size_bytes + size_bytes > _CACHE_BYTES:
            self.clear()
            self._size_bytes = 0
        self._size_bytes += size_bytes
        self[chunk] = ids
        return ids


def _merges_file() -> bytes:
    return Path(__file__).with_name(MERGES_FILE).read_bytes()


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in the table: itself where it prints, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_in = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(stand_in)) for byte in range(256)]


@functools.cache
def _vocabulary() -> list[str]:
    """The pieces in the order of their ids: the bytes in the order of their characters, the merges, the two marks."""
    ordered = sorted(_byte_symbols(), key=ord)
    return [*ordered, *(symbol + END_OF_WORD for symbol in ordered), *map(add, *_pairs()), START_TEXT, END_TEXT]


@functools.cache
def _pairs() -> tuple[list[str], list[str]]:
    """The left and the right ones of the pairs of pieces to merge, by rank."""
    # The table goes on for five times as long.
    with gzip.open(io.BytesIO(_merges_file())) as file:
        text = file.read(MERGES_BYTES).decode("utf-8", "ignore")
    lines = text.split("\n", MERGE_COUNT + 1)[1 : MERGE_COUNT + 1]
    pieces = " ".join(lines).split(" ")
    return pieces[::2], pieces[1::2]


@functools.cache
def _table() -> _Chunks:
    import regex

    ids = dict(zip(_vocabulary(), range(VOCAB_SIZE), strict=True))
    left, right = ([ids[piece] for piece in pieces] for pieces in _pairs())
    merges = list(zip(left, right, range(_BYTE_PIECES, _BYTE_PIECES + MERGE_COUNT), strict=True))
    ranks = dict(zip(zip(left, right, strict=True), range(MERGE_COUNT), strict=True))
    symbols = _byte_symbols()
    inside = [ids[symbol] for symbol in symbols]
    last = [ids[symbol + END_OF_WORD] for symbol in symbols]
    find_words: Callable[[str], list[str]] = regex.compile(WORDS, regex.IGNORECASE).findall

    def encode_word(word: str) -> list[int]:
        if word in (START_TEXT, END_TEXT):
            return [ids[word]]
        # The merges of a word that is a piece itself end in that piece; for this table that is so, and tested.
        piece = ids.get(word + END_OF_WORD) if word.isascii() else None
        if piece is not None:
            return [piece]
        data = word.encode("utf-8")
        return _merge([*(inside[byte] for byte in data[:-1]), last[data[-1]]], merges, ranks)

    return _Chunks(lambda chunk: tuple(itertools.chain.from_iterable(map(encode_word, find_words(chunk)))))


@functools.cache
def _pieces() -> list[bytes]:
    """The text of each id, a space closing each word."""
    byte_of = {ord(symbol): byte for byte, symbol in enumerate(_byte_symbols())}
    # Latin-1 maps the character of each code below 256 to that byte.
    return [piece.translate(byte_of).encode("latin-1").replace(b"</w>", b" ") for piece in _vocabulary()]


def _merge(word: list[int], merges: Sequence[tuple[int, int, int]], ranks: dict[tuple[int, int], int]) -> list[int]:
    """Apply to the symbols of `word`, in rounds, the pair of the lowest rank present, at every place left to right.

    A heap of (rank, place) finds the pairs, so a word of 100,000 letters costs n log n; pairs that a round creates
    wait for the next one, even if their rank is lower.
    """
    length = len(word)
    after, before = list(range(1, length + 1)), list(range(-1, length - 1))
    heap: list[tuple[int, int]] = []

    def note(left: int, right: int, into: list[tuple[int, int]]) -> None:
        rank = ranks.get((word[left], word[right]))
        if rank is not None:
            into.append((rank, left))

    for place in range(length - 1):
        note(place, place + 1, heap)
    heapify(heap)
    while heap:
        current = heap[0][0]
        left, right, merged = merges[current]
        created: list[tuple[int, int]] = []
        while heap and heap[0][0] == current:
            place = heappop(heap)[1]
            other = after[place]
            # Entries outlive their pairs: an earlier merge may have taken either symbol.
            if other >= length or word[place] != left or word[other] != right:
                continue
            word[place], word[other] = merged, -1
            after[place] = beyond = after[other]
            if beyond < length:
                before[beyond] = place
                note(place, beyond, created)
            if before[place] >= 0:
                note(before[place], place, created)
        for entry in created:
            heappush(heap, entry)
    return [symbol for symbol in word if symbol >= 0]
