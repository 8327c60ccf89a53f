"""The tokenizer: published ids, open_clip's own code beside it, hostile text, slots, and bytes of any encoding."""

import base64
import json
import pickle
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rwkvclip_cli.data import captions
from rwkvclip_cli.data.captions import END_ID, START_ID, Tokenizer, clean_captions, clean_text, decode_caption_bytes

HERE = Path(__file__).parent
ROWS: list[dict[str, Any]] = [json.loads(line) for line in (HERE / "captions.jsonl").read_text("utf-8").splitlines()]
tokenizer = Tokenizer()


def demo_captions() -> list[str]:
    with tarfile.open(HERE / "demo.tar") as archive:
        files = [archive.extractfile(member) for member in archive if member.name.endswith(".txt")]
        return [line for file in files if file is not None for line in file.read().decode("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a photo of a cat", [320, 1125, 539, 320, 2368]),
        ("A  Photo\tof\r\na CAT ", [320, 1125, 539, 320, 2368]),
        ("", []),
        ("!", [256]),
        ("2024", [273, 271, 273, 275]),
        ("it's", [585, 568]),
        ("it'\u017fx", [585, 6, 129, 379, 343]),  # a long s is a kind of s to the published word pattern
        ("fish &amp; chips", [2759, 261, 8855]),
        ("fish &amp;amp; chips", [2759, 261, 8855]),
        ("<|endoftext|>", [49407]),
    ],
)
def test_known_ids(text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize("row", [row for row in ROWS if row["caption"] is not None], ids=lambda row: row["id"])
def test_awkward_captions_as_published(row: dict[str, Any]) -> None:
    published = row["tokens"]
    assert tokenizer.tokenize(row["caption"]) == published + [0] * (77 - len(published))


def test_the_rows_of_awkward_captions_are_all_there() -> None:
    assert len(ROWS) == 133
    assert sum(row["caption"] is not None for row in ROWS) > 110


def test_demo_captions_equal_open_clip(open_clip_tokenizer: ModuleType) -> None:
    theirs = open_clip_tokenizer.SimpleTokenizer()
    texts = demo_captions()
    assert len(texts) == 177
    for text in texts:
        assert tokenizer.tokenize(text) == theirs(text)[0].tolist(), text


PIECES = [
    *("&amp;", "&lt;", "&AMP", "&#39;", "&#x27;", "&eacute;", "&EACUTE;", "&ntilde", "&#128;", "&#xD800;", "&#28;"),
    *("'s", "'RE", "'ll", "'\u017f", "\u2019s", "\u201c", "<b>", "<|", "|>", "</w>", "\x1b[31m", "\ufeff", "\u200b"),
    *(
        "ﬁ",
        "\uff21",
        "İ",
        "ß",
        "Σ",
        "ς",
        "\u017f",
        "\u212a",
        "½",
        "Ⅷ",
        "٣",
        "ﷺ",
        "e\u0301",
        "\U0001f600",
        "\ud83d",
        "\ude00",
    ),
    *("\r\n", "\x85", "\u2028", "\x1c", "\x00", "\xa0", "\u3000", "\x8c", "\u00e2\u20ac\u201d", "\u00c3\u00a9"),
]


def random_text(rng: random.Random) -> str:
    """Printable ASCII, any code point and telling pieces mixed, or a long run of letters that merge deeply."""
    if rng.random() < 0.3:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyzetaoin'! 01", k=rng.choice([5, 20, 100, 400])))
    draw = [
        lambda: chr(rng.randrange(0x20, 0x7F)),
        lambda: chr(rng.randrange(0x250)),
        lambda: chr(rng.randrange(0x3000)),
        lambda: chr(rng.randrange(0x110000)),
        lambda: rng.choice(PIECES),
        lambda: " ",
    ]
    kinds = rng.choices(range(len(draw)), weights=[6, 3, 3, 2, 4, 2], k=rng.choice([1, 3, 8, 20, 60]))
    return "".join(draw[kind]() for kind in kinds)


def compare_with_open_clip(module: ModuleType, seed: int, count: int) -> None:
    theirs, rng = module.SimpleTokenizer(), random.Random(seed)
    for _ in range(count):
        text = random_text(rng)
        assert tokenizer.encode(text) == theirs.encode(text), ascii(text)


def test_random_text_equals_open_clip(open_clip_tokenizer: ModuleType) -> None:
    compare_with_open_clip(open_clip_tokenizer, seed=1, count=3000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_much_random_text_equals_open_clip(open_clip_tokenizer: ModuleType, seed: int) -> None:
    compare_with_open_clip(open_clip_tokenizer, seed, count=25_000)


def test_our_merges_file_is_open_clips(open_clip_tokenizer: ModuleType) -> None:
    packaged = Path(captions.__file__).with_name(captions.MERGES_FILE)
    assert packaged.read_bytes() == Path(open_clip_tokenizer.default_bpe()).read_bytes()


def test_the_hash_is_that_of_the_published_merges_file() -> None:
    assert tokenizer.hash == "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("a" * 100_000, 12_501),
        ("猫" * 33_000, 99_000),
        ("\u00c3\u00a9" * 50_000, 50_000),
        ("&" * 100_000, 99_999),
        ("&amp;" * 20_000, 19_999),
        ("<|endoftext|>" * 8_000, 8_000),
        ("word " * 20_000, 20_000),
        ("\ud83d" * 1000, None),
        ("\0" * 100_000, 0),
        ("\x1b[" * 5000, None),
    ],
    ids=lambda value: ascii(value[:8]) if isinstance(value, str) else str(value),
)
def test_long_and_hostile_text_is_read(text: str, count: int | None) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < 49408 for token in ids)
    assert count is None or len(ids) == count
    assert len(tokenizer.tokenize(text)) == 77


# A pair's rank is its place in the list. Symbols: 0 a, 1 b, 2 c, 3 ab, 4 abc, 9 abcab, whose better rank comes last.
MERGES = [(4, 3, 9), (3, 2, 4), (0, 1, 3)]
RANKS = {(left, right): rank for rank, (left, right, _) in enumerate(MERGES)}


@pytest.mark.parametrize(
    ("word", "merged"),
    [
        ([0], [0]),
        ([0, 1], [3]),
        ([0, 1, 2], [4]),
        # Both "ab" become "abc" in one round, before the better pair (abc, ab) may take the second "ab".
        ([0, 1, 2, 0, 1, 2], [4, 4]),
        ([0, 1, 2, 0, 1], [9]),
        ([0, 1, 2, 0], [4, 0]),
        ([2, 0, 0, 1], [2, 0, 3]),
    ],
)
def test_merging_by_hand(word: list[int], merged: list[int]) -> None:
    assert captions._merge(word, MERGES, RANKS) == merged


def test_a_repeated_symbol_merges_from_the_left() -> None:
    assert captions._merge([0, 0, 0, 0, 0], [(0, 0, 1), (1, 1, 2)], {(0, 0): 0, (1, 1): 1}) == [2, 0]


def test_numbers_that_python_refuses_to_read() -> None:
    assert clean_text("&#" + "9" * 5000 + ";x &#" + "0" * 5000 + "65;") == "\ufffdx a"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("  A\tCat\r\n", "a cat"),
        ("a\u2028cat\x85 \x0bo\x1cn", "a cat\u2026 on"),
        ("fish &amp;amp; chips", "fish & chips"),
        ("\u201cquoted\u201d", '"quoted"'),
        ("caf\u00c3\u00a9", "café"),
        ("Saukonp\udce4", "saukonp\ufffd"),
        ("\ufeffA\0B", "ab"),
    ],
)
def test_text_cleaning(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned


def test_long_captions_are_cut_and_keep_the_end() -> None:
    ids = tokenizer.tokenize("cat " * 100)
    assert ids == [START_ID] + [2368] * 75 + [END_ID]
    assert tokenizer.tokenize("cat " * 75) == ids
    assert tokenizer.tokenize("cat " * 74) == [START_ID] + [2368] * 74 + [END_ID, 0]
    assert tokenizer.tokenize("cat cat", context_length=3) == [START_ID, 2368, END_ID]


def test_fewer_captions_than_slots_repeat_in_order() -> None:
    a, b, c = ([START_ID, number, END_ID, 0] for number in (320, 2368, 1929))

    def filled(*captions: str | list[int], slots: int = 3) -> list[float]:
        return list(tokenizer.fill_slots(captions, slots, 4)[0])

    assert filled("a") == a + a + a
    assert filled("a", "cat") == a + b + a
    assert filled("a", "cat", "dog") == a + b + c
    assert filled("a", "cat", "dog", slots=2) == a + b
    assert filled(b, "a a a", [7, 8, 0, 9]) == [*b, START_ID, 320, 320, END_ID, 7, 8, 0, 9]
    assert len(tokenizer.fill_slots(["a"], 3)[0]) == 231
    with pytest.raises(ValueError, match="at least one caption"):
        tokenizer.fill_slots([], 3)


def test_a_slot_holds_what_the_tokenizer_gives() -> None:
    for text in ("", "a cat", "cat " * 74, "cat " * 75, "cat " * 100):
        assert list(tokenizer.fill_slots([text], 2)[0]) == 2 * tokenizer.tokenize(text)


def test_cut_captions_are_counted_once_each() -> None:
    assert tokenizer.fill_slots(["cat cat", "cat cat cat"], 3, 4)[1] == 1
    assert tokenizer.fill_slots(["cat cat cat"], 3, 4)[1] == 1
    assert tokenizer.fill_slots(["cat", "cat", "cat cat cat"], 2, 4)[1] == 0


def test_decoding_gives_the_cleaned_text() -> None:
    slot = tokenizer.tokenize("A caf\u00e9, it's <|endoftext|> 猫!!")
    text = "a café , it 's <|endoftext|>猫 !!"
    assert tokenizer.decode(slot) == text
    assert tokenizer.decode([float(number) for number in slot]) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.tokenize("")) == tokenizer.decode([]) == ""
    assert tokenizer.decode([0, 0]) == "!!"  # zeros without an end before them are not padding
    assert tokenizer.decode(tokenizer.encode("猫")[:1]) == "\ufffd"  # a character cut in two
    with pytest.raises(ValueError, match="49408 is no token id; they go from 0 to 49407"):
        tokenizer.decode([49408])
    with pytest.raises(ValueError, match="-1 is no token id"):
        tokenizer.decode([-1])


def test_blank_captions_count_as_none() -> None:
    blank = ["", " ", "\n", "\t \u00a0 \u3000", "\0\0", " \0 ", "\x85\u2028", None]
    words = ["None", "NA", "null", "nan", "0", ".", "\u200b", " a "]
    assert clean_captions([*blank, *words, *blank]) == words
    assert clean_captions(blank) == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"a cat", "a cat"),
        ("a 猫".encode(), "a 猫"),
        (b"\xef\xbb\xbfa cat\r\n", "a cat\r\n"),
        ("a 猫".encode("utf-16"), "a 猫"),
        (b"\xfe\xff" + "a 猫".encode("utf-16-be"), "a 猫"),
        ("a 猫".encode("utf-32"), "a 猫"),
        ("a cat 猫".encode("utf-16-le"), "a cat 猫"),
        ("a cat 猫".encode("utf-16-be"), "a cat 猫"),
        (b"a\0", "a\0"),
        (b"OLYMPUS\0DIGITAL CAMERA", "OLYMPUS\0DIGITAL CAMERA"),
        (b"\0" * 64, "\0" * 64),
        (b"a cat \xed\xa0\xbd\xed\xb0\x88", "a cat \U0001f408"),
        (b"a\xc0\x80b", "a\0b"),
        ("Saukonpää".encode("latin-1"), "Saukonpää"),
        (b"\x93it\x92s\x94 5 \x80", "\u201cit\u2019s\u201d 5 \u20ac"),
        (b"\x81\x8d\xff", "\x81\x8d\u00ff"),
        (b"\xff\xfea", "\ufffd"),
    ],
)
def test_bytes_of_any_encoding_are_read(data: bytes, text: str) -> None:
    assert decode_caption_bytes(data) == text


def test_bytes_of_awkward_captions_are_read() -> None:
    rows = [row for row in ROWS if "bytes_b64" in row]
    assert len(rows) > 20
    for row in rows:
        text = decode_caption_bytes(base64.b64decode(row["bytes_b64"]))
        # What Python read with surrogates is Latin-1, and a mark is no text: there the bytes tell more than the row.
        if row["caption"] is not None and "surrogates" not in row["kind"]:
            assert text == row["caption"].removeprefix("\ufeff"), row["id"]
        if row["kind"].startswith("UTF-16"):
            assert text == "A pair of binoculars."
        tokenizer.tokenize(text)


def test_no_bytes_raise() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        tokenizer.tokenize(decode_caption_bytes(rng.randbytes(rng.randrange(40))))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captions, "_CHUNK_BYTES", 30)
    monkeypatch.setattr(captions, "_CACHE_BYTES", 3 * 40)
    chunks = captions._Chunks(lambda chunk: (len(chunk),))
    assert [chunks[chunk] for chunk in ("a", "bb", "ccc", "dd", "a", "e" * 100)] == [
        (1,),
        (2,),
        (3,),
        (2,),
        (1,),
        (100,),
    ]
    assert list(chunks) == ["e" * 100]


def test_a_word_that_is_a_piece_merges_to_that_piece() -> None:
    """Of the whole table, so that words need not be merged to know it."""
    ids = {piece: number for number, piece in enumerate(captions._vocabulary())}
    assert len(ids) == captions.VOCAB_SIZE
    pairs = [(ids[left], ids[right]) for left, right in zip(*captions._pairs(), strict=True)]
    merges = [(left, right, 512 + rank) for rank, (left, right) in enumerate(pairs)]
    ranks = {pair: rank for rank, pair in enumerate(pairs)}
    words = [piece.removesuffix("</w>") for piece in ids if piece.endswith("</w>")]
    assert len(words) > 30_000
    for word in words:
        symbols = [*(ids[symbol] for symbol in word[:-1]), ids[word[-1] + "</w>"]]
        assert captions._merge(symbols, merges, ranks) == [ids[word + "</w>"]], word


CALM_PIECES = [
    *"abc ,.'\"<>#",
    " a ",
    "\n",
    "\t",
    *"éàñßøþÃâ€“”…—ﬁĳŉǆ¨÷¿\u2018\u2019\u2013\u00b4\u00d7",
    "Ã©",
    "â€œ",
    "\u0301",
    "\u0327",
    "\u02bc",
]
CALM_PIECES += [
    "\u3000",
    "、",
    "日本",
    "\uff21",
    "한",
    "\u1112\u1161",
    "שלום",
    "नमस्ते",
    "Привет",
    "ΑΩ",
    "😀",
    "\ue000",
    "\u206a",
    "\u200d",
]


def check_repairs(seed: int, count: int) -> int:
    """Compare quick repairs with thorough ones; how many texts were not plain and yet quick."""
    rng, quick = random.Random(seed), 0
    for _ in range(count):
        text = (
            "".join(rng.choices(CALM_PIECES, k=rng.choice([1, 2, 4, 8, 30])))
            if rng.random() < 0.7
            else random_text(rng)
        )
        assert captions._repair(text).split() == captions._repair_thoroughly(text).split(), ascii(text)
        quick += bool(not text.isascii() and captions._CALM.fullmatch(text) and captions._straighten(text) is not None)
    return quick


def test_quick_repairs_are_the_published_ones() -> None:
    assert check_repairs(seed=7, count=8000) > 1000
    for text in [row["caption"] for row in ROWS if row["caption"] is not None]:
        assert captions._repair(text).split() == captions._repair_thoroughly(text).split()


@pytest.mark.slow
def test_quick_repairs_of_every_character_and_many_texts_are_the_published_ones() -> None:
    check_repairs(seed=8, count=200_000)
    for code in range(0x110000):
        for text in (chr(code), f"a{chr(code)} b"):
            assert captions._repair(text).split() == captions._repair_thoroughly(text).split(), hex(code)


def test_plain_text_is_its_own_repair() -> None:
    rng = random.Random(9)
    letters = "".join(map(chr, range(0x20, 0x7F))).replace("&", "") + "\t\n\r"
    for _ in range(3000):
        text = "".join(rng.choices(letters, k=rng.randrange(60)))
        assert captions._repair(text) == text
        assert " ".join(captions._repair_thoroughly(text).split()) == " ".join(text.split())


def test_workers_can_have_it() -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("a cat") == [320, 2368]
    assert len(pickle.dumps(tokenizer)) < 200


def test_importing_loads_nothing() -> None:
    program = (
        "import sys; from rwkvclip_cli.data.captions import Tokenizer; Tokenizer();"
        "sys.exit(bool({'ftfy', 'regex', 'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
