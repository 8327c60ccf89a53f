"""`pack --dedupe` drops the pictures of earlier records, whatever their format; repeated captions are counted."""

import csv
import io
import json
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from pack_files import files_of, photo, smooth, write, write_tar
from PIL import Image

from rwkvclip_cli.config import InspectConfig, PackConfig
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packing import seen as seen_module
from rwkvclip_cli.data.packing.digest import DIGEST_BYTES, caption_hashes, picture_digest
from rwkvclip_cli.data.packing.pack import PackSummary, pack
from rwkvclip_cli.data.packing.samples import Ignored, Reject
from rwkvclip_cli.data.packing.seen import Seen, SeenPictures
from rwkvclip_cli.data.packing.worker import Packed
from rwkvclip_cli.data.recordio import RecordReader
from rwkvclip_cli.inspect import inspect_data


def saved(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(smooth(seed))


def turned(jpeg: bytes, orientation: int) -> bytes:
    """The same JPEG data behind an EXIF segment that has it turned."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    payload = b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")
    return jpeg[:2] + b"\xff\xe1" + (len(payload) + 2).to_bytes(2, "big") + payload + jpeg[2:]


def with_comment(jpeg: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xfe\0\x07hello" + jpeg[2:]


RGBA = Image.merge("RGBA", (*picture().split(), Image.new("L", picture().size, 255)))
SAME = {
    "bytes": (photo(), photo()),
    "metadata": (photo(), with_comment(photo())),
    "png-bmp": (saved(picture(), "PNG"), saved(picture(), "BMP")),
    "opaque-alpha": (saved(picture(), "PNG"), saved(RGBA, "PNG")),
    "jpeg-png": (photo(), saved(Image.open(io.BytesIO(photo())), "PNG")),
    "turned": (
        turned(photo(), 3),
        saved(Image.open(io.BytesIO(photo())).transpose(Image.Transpose.ROTATE_180), "PNG"),
    ),
}
OTHER = {
    "one-pixel": (
        saved(picture(), "PNG"),
        saved(Image.fromarray(smooth() ^ np.eye(32, 48, dtype=np.uint8)[..., None]), "PNG"),
    ),
    "another-shape": (saved(Image.new("RGB", (6, 4)), "PNG"), saved(Image.new("RGB", (4, 6)), "PNG")),
    "another-turn": (turned(photo(), 3), photo()),
    "damaged": (b"not a picture", b"another"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_looks_the_same_has_one_digest(name: str) -> None:
    one, two = map(picture_digest, SAME[name])
    assert one == two
    assert len(one) == DIGEST_BYTES


@pytest.mark.parametrize("name", OTHER)
def test_what_looks_different_has_two(name: str) -> None:
    one, two = map(picture_digest, OTHER[name])
    assert one != two


def packed_as(out: Path, *sources: Path, **options: object) -> PackSummary:
    given = {"workers": 1, "dedupe": True} | options
    return pack(PackConfig(sources=tuple(map(str, sources)), out=str(out), **given))  # type: ignore[arg-type]


def rejects_of(out: Path) -> list[tuple[str, str, str]]:
    lines = out.with_suffix(".rejects.jsonl").read_text().splitlines()
    return [tuple(json.loads(line).values()) for line in lines]  # type: ignore[misc]


def sources_of(out: Path) -> list[str]:
    return [line.split("\t")[1].rpartition("/")[2] for line in out.with_suffix(".sources.tsv").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine pictures of three looks: c and d as a, f as b, h as e; g has no caption, and i looks as g."""
    files: dict[str, str | bytes] = {
        "a.png": saved(picture(0), "PNG"),
        "b.jpg": photo(1),
        "c.bmp": saved(picture(0), "BMP"),
        "d.png": saved(picture(0), "PNG"),
        "e.jpg": photo(2),
        "f.jpg": with_comment(photo(1)),
        "g.jpg": photo(3),
        "h.png": saved(Image.open(io.BytesIO(photo(2))), "PNG"),
        "i.jpg": photo(3),
    }
    captions = {f"{name[0]}.txt": f"this is {name[0]}" for name in files if name != "g.jpg"}
    return write(tmp_path_factory.mktemp("dedupe") / "imgs", files | captions)


@pytest.mark.parametrize("proof", ["decode", "structure", "none"])
def test_later_pictures_of_one_look_are_rejected_and_name_the_first(folder: Path, tmp_path: Path, proof: str) -> None:
    summary = packed_as(tmp_path / "out.rec", folder, proof=proof)
    assert sources_of(tmp_path / "out.rec") == ["a.png", "b.jpg", "e.jpg", "i.jpg"]
    assert (summary.count, summary.rejects) == (4, 5)
    assert summary.reasons == {"duplicate": 4, "missing-caption": 1}
    assert rejects_of(tmp_path / "out.rec") == [
        (f"{folder}/{name}", "duplicate", f"{folder}/{name}: the same picture as {folder}/{first}")
        if first
        else (f"{folder}/{name}", "missing-caption", f"{folder}/{name}: no caption file of the same stem beside it")
        for name, first in (
            ("c.bmp", "a.png"),
            ("d.png", "a.png"),
            ("f.jpg", "b.jpg"),
            ("g.jpg", ""),
            ("h.png", "e.jpg"),
        )
    ]
    manifest = json.loads((tmp_path / "out.manifest.json").read_text())
    assert manifest["options"]["dedupe"] is True
    assert manifest["statistics"]["images_repeated"] == 4
    assert manifest["statistics"]["image_format"] == {"jpeg": 3, "png": 1}


def test_without_the_option_all_are_kept(folder: Path, tmp_path: Path) -> None:
    assert packed_as(tmp_path / "out.rec", folder, dedupe=False).count == 8


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    """Two hundred pictures of seventy looks, in batches of 32 that several workers pack side by side."""
    files = [entry for i in range(200) for entry in ((f"{i:03}.jpg", photo(i % 70)), (f"{i:03}.txt", b"a picture"))]
    tar = write_tar(tmp_path / "pairs.tar", files)
    for workers in (1, 3):
        packed_as(tmp_path / f"out{workers}.rec", tar, workers=workers)
    one, three = files_of(tmp_path / "out1.rec"), files_of(tmp_path / "out3.rec")
    assert one == three
    assert one["idx"].count(b"\n") == 70
    assert sources_of(tmp_path / "out1.rec") == [f"pairs.tar:{i:03}.jpg" for i in range(70)]


def test_bytes_that_no_careful_reader_decodes_are_compared_as_they_are(tmp_path: Path) -> None:
    cut = photo(5)[:-200]
    other = photo(6)[:-200]
    files: dict[str, str | bytes] = {"a.jpg": cut, "b.jpg": other, "c.jpg": cut}
    source = write(tmp_path / "imgs", files | {f"{name}.txt": "cut off" for name in "abc"})
    summary = packed_as(tmp_path / "out.rec", source, proof="none")
    assert sources_of(tmp_path / "out.rec") == ["a.jpg", "b.jpg"]
    assert summary.reasons == {"duplicate": 1}


def test_pictures_are_compared_before_they_are_resized(tmp_path: Path) -> None:
    """At one pixel a side, everything grey is the same."""
    greys = {
        f"{name}.png": saved(Image.new("RGB", (4, size), "grey"), "PNG")
        for name, size in (("a", 4), ("b", 3), ("c", 4))
    }
    source = write(tmp_path / "imgs", greys | {f"{name}.txt": "grey" for name in "abc"})
    packed_as(tmp_path / "out.rec", source, max_side=1)
    assert sources_of(tmp_path / "out.rec") == ["a.png", "b.png"]


def test_rows_of_tokens_stay_with_their_samples(folder: Path, tmp_path: Path) -> None:
    rows = np.array([[49406, 320 + sample, 49407] + [0] * 74 for sample in range(9)])
    np.save(tmp_path / "tokens.npy", rows)
    packed_as(tmp_path / "out.rec", folder, tokens=str(tmp_path / "tokens.npy"))
    records = inspect_data(InspectConfig(data=str(tmp_path / "out.rec"), records=":")).document["records"]
    wanted = ["a", "b", "e", "g"]  # its row gives g a caption, so i repeats it
    assert [entry["source"].rpartition("/")[2][0] for entry in records] == wanted
    with RecordReader(tmp_path / "out.rec") as reader:
        assert [reader.record(i).labels[1] - 320 for i in range(4)] == ["abcdefghi".index(name) for name in wanted]


def test_captions_are_counted_blank_and_repeated_ones_too(tmp_path: Path) -> None:
    rows = [
        ("0.jpg", "a cat", "a dog", ""),
        ("1.jpg", "a cat", " \t", "A  CAT"),  # the tokens of "a cat" again, twice
        ("2.jpg", "", "", ""),
        ("3.jpg", "a dog", "a cow", "an elk"),
        ("4.jpg", "a cow", "", "a yak"),
    ]
    table = tmp_path / "pairs.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("image", "one", "two", "three"), *rows])
    write(tmp_path, {row[0]: photo(number) for number, row in enumerate(rows)})
    keys = ("one", "two", "three")
    summary = packed_as(tmp_path / "out.rec", table, caption_key=keys, dedupe=False)
    assert summary.statistics["captions_blank"] == 1 + 1 + 1
    # Behind "a cat" and "a dog": a cat, A CAT, a dog, and behind "a cow" once more that.
    assert summary.statistics["captions_repeated"] == 4
    assert summary.reasons == {"missing-caption": 1}
    assert "captions that an earlier one equals: 4" in summary.text()
    report = inspect_data(InspectConfig(data=str(tmp_path / "out.rec")))
    assert report.document["statistics"]["captions_repeated"] == 4
    assert "  captions that an earlier one equals: 4\n" in report.text
    assert "  captions that were blank: 3\n" in report.text
    assert "  images as they came: jpeg 4\n" in report.text


def test_a_line_end_at_the_end_of_a_caption_file_is_no_blank_caption(tmp_path: Path) -> None:
    source = write(
        tmp_path / "imgs", {"a.jpg": photo(), "a.txt": "one\n", "b.jpg": photo(1), "b.txt": "two\n\nthree\n"}
    )
    assert packed_as(tmp_path / "out.rec", source).statistics["captions_blank"] == 1


def record(look: int, caption: int, source: str) -> Packed:
    labels = array("f", [49406, caption, 49407])
    digest = look * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128
    (hashes,) = caption_hashes(labels, 1, 3)
    word = digest.to_bytes(DIGEST_BYTES, "little")
    return Packed(source, labels, b"", "kept", 1, 1, (3,), 0, 0, digest=word, hashes=hashes)


def stream(count: int) -> Iterator[Packed]:
    """Pictures of which every third repeats the one before the last, and captions of 97 kinds."""
    for number in range(count):
        yield record(number - 2 * (number % 3 == 2), number // 2 % 97, f"imgs/{number}.jpg")


def sifted(seen: Seen, outcomes: Iterable[Packed | Reject | Ignored]) -> list[str]:
    return [outcome.message if isinstance(outcome, Reject) else outcome.source for outcome in seen.sift(outcomes)]


@pytest.mark.parametrize("stop", [0, 1, 2, 500, 999])
def test_what_was_seen_is_known_after_a_break(tmp_path: Path, stop: int) -> None:
    """Cut off anywhere behind a flush, the files are taken up where that was, with the same outcomes and counts."""
    outcomes = list(stream(1000))
    (tmp_path / "whole").mkdir()
    with Seen(tmp_path / "whole", dedupe=True) as whole:
        wanted, repeated = sifted(whole, outcomes), whole.repeated_captions()
    with Seen(tmp_path, dedupe=True) as first:
        begun = sifted(first, outcomes[:stop])
        done = first.flush()
        list(first.sift(outcomes[stop : stop + 7]))  # written, but not before the last flush
    with Seen(tmp_path, dedupe=True, done=done) as again:
        assert begun + sifted(again, outcomes[stop:]) == wanted
        assert again.repeated_captions() == repeated
    assert wanted[2] == "imgs/2.jpg: the same picture as imgs/0.jpg"
    assert sum(": the same picture as imgs/" in told for told in wanted) == 333


def test_rejects_and_ignored_files_pass(tmp_path: Path) -> None:
    others = [Reject("a", "bad-row", "a: bad"), Ignored("b")]
    with Seen(tmp_path, dedupe=True) as seen:
        assert list(seen.sift(others)) == others
        assert seen.repeated_captions() == 0


def test_equal_halves_of_digests_are_told_apart(tmp_path: Path) -> None:
    pictures = SeenPictures(tmp_path)
    digests = [bytes(8) + number.to_bytes(8, "little") for number in range(300)]
    assert [pictures.add(digest, f"caf\udce9 {number}") for number, digest in enumerate(digests)] == [None] * 300
    assert [pictures.add(digest, "later") for digest in digests] == [f"caf\udce9 {number}" for number in range(300)]
    pictures.close()


def test_the_table_grows_and_forgets_nothing(tmp_path: Path) -> None:
    draw = np.random.default_rng(0).integers(0, 2**63, (100_000, 2))
    pictures = SeenPictures(tmp_path)
    for number, digest in enumerate(draw):
        if number == 99_999:
            done = pictures.flush()
        assert pictures.add(digest.tobytes(), str(number)) is None
    assert [pictures.add(draw[number].tobytes(), "") for number in (0, 43_690, 43_691, 99_999)] == [
        "0", "43690", "43691", "99999"
    ]  # fmt: skip
    pictures.close()
    again = SeenPictures(tmp_path, done)
    assert again.add(draw[99_998].tobytes(), "") == "99998"
    assert again.add(draw[99_999].tobytes(), "") is None
    again.close()


@pytest.mark.parametrize("at_once", [1, 7, 64, 1 << 20])
def test_captions_are_counted_in_parts_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(seen_module, "COUNTED_AT_ONCE", at_once)
    with Seen(tmp_path, dedupe=False) as seen:
        list(seen.sift(stream(250)))
        assert seen.repeated_captions() == 250 - 97


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    (tmp_path / seen_module.CAPTIONS).symlink_to("/dev/full")
    with Seen(tmp_path, dedupe=False) as seen:
        list(seen.sift(stream(4)))
        with pytest.raises(RwkvClipError, match=r"cannot write .*seen-captions: No space left on device"):
            seen.flush()
