"""Pictures become JPEG that DALI decodes to what the careful reader sees; the awkward ones are files of this folder."""

import io
import random
import re
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, types
from pack_files import smooth
from PIL import ExifTags, Image

from rwkvclip_cli.data.packing.decoder import Decoder
from rwkvclip_cli.data.packing.images import encode_jpeg, is_same, read_rgb
from rwkvclip_cli.data.packing.jpeg import SCAN_DATA, lengthen_scans, walk_jpeg
from rwkvclip_cli.data.packing.prove import (
    FAITHFUL_MEAN,
    KEPT,
    RESIZED,
    TRIALS,
    ImageOptions,
    Prepared,
    has_means,
    prepare,
)
from rwkvclip_cli.data.packing.samples import BadImage

FOLDER = Path(__file__).parent
WEIRD = {
    name: expected
    for name, expected, _ in (line.split("\t") for line in (FOLDER / "weird_images.tsv").read_text().splitlines())
}


def dali_pixels(jpeg: bytes) -> np.ndarray:
    """The pixels in DALI, through a pipeline of this test's own."""
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
    with pipeline:
        data = fn.external_source(name="data", device="cpu")
        pipeline.set_outputs(fn.decoders.image(data, device="cpu", output_type=types.RGB))
    pipeline.build()
    pipeline.feed_input("data", [np.frombuffer(jpeg, np.uint8)])
    return np.array(pipeline.run()[0].at(0))


def outcome(result: Prepared | BadImage) -> str:
    return result.kept if isinstance(result, Prepared) else f"reject:{result.reason}"


def png(rgb: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, "PNG")
    return buffer.getvalue()


def with_junk(jpeg: bytes) -> bytes:
    """Bytes between two segments: Pillow skips them; DALI refuses them and loses its pipeline."""
    second = jpeg.index(b"\xff\xdb")
    return jpeg[:second] + b"junk" + jpeg[second:]


@pytest.fixture(scope="module")
def weird() -> dict[str, Prepared | BadImage]:
    """What becomes of every awkward file, prepared as one run so that bad ones sit between good ones."""
    names = sorted(WEIRD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = prepare([(FOLDER / "weird_images" / name).read_bytes() for name in names], ImageOptions())
    return dict(zip(names, results, strict=True))


def test_the_table_names_every_awkward_file():
    assert sorted(WEIRD) == sorted(path.name for path in (FOLDER / "weird_images").iterdir())


@pytest.mark.parametrize("name", sorted(WEIRD))
def test_an_awkward_picture_is_kept_or_mended_or_refused(weird, name):
    result = weird[name]
    assert outcome(result) == WEIRD[name]
    if not isinstance(result, Prepared):
        return
    data = (FOLDER / "weird_images" / name).read_bytes()
    careful, seen = read_rgb(data), dali_pixels(result.jpeg)
    assert seen.shape == careful.shape == (result.height, result.width, 3)
    if result.kept == KEPT:
        assert result.jpeg == data
        assert np.array_equal(seen, careful)
    else:
        assert np.abs(seen.astype(int) - careful).mean() <= FAITHFUL_MEAN


def test_a_plain_jpeg_keeps_its_bytes():
    jpeg = encode_jpeg(smooth(), 80)
    assert prepare([jpeg], ImageOptions()) == [Prepared(jpeg, KEPT, 48, 32)]


def test_bad_pictures_leave_their_neighbours_alone():
    good = [encode_jpeg(smooth(seed), 90) for seed in range(40)]
    pictures = [with_junk(jpeg) if seed % 13 == 5 else jpeg for seed, jpeg in enumerate(good)]
    results = prepare([*pictures, b"no picture"], ImageOptions())
    assert Counter(map(outcome, results)) == {
        KEPT: 37,
        "re-encoded:refused-by-dali": 3,
        "reject:unreadable-image": 1,
    }
    for seed, result in enumerate(results[:-1]):
        assert isinstance(result, Prepared)
        assert np.abs(read_rgb(result.jpeg).astype(int) - read_rgb(good[seed])).mean() <= FAITHFUL_MEAN


def test_noise_raises_the_quality_until_it_is_faithful():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (result,) = prepare([png(noise)], ImageOptions(quality=50))
    assert isinstance(result, Prepared)
    assert np.abs(dali_pixels(result.jpeg).astype(int) - noise).mean() <= FAITHFUL_MEAN
    # A smooth picture is faithful at once and stays at the quality asked for.
    (easy,) = prepare([png(smooth())], ImageOptions(quality=90))
    assert isinstance(easy, Prepared)
    assert easy.jpeg == encode_jpeg(smooth(), 90)


def test_a_decoder_that_shows_other_pixels_is_believed_over_the_bytes():
    class Wrong(Decoder):
        def decode(self, jpegs, sizes):
            return [None if pixels is None else pixels // 2 for pixels in super().decode(jpegs, sizes)]

    (result,) = prepare([encode_jpeg(smooth(), 90)], ImageOptions(), Wrong())
    assert outcome(result) == "reject:not-faithful"


def test_a_long_side_is_resized_and_a_short_one_is_not():
    long, short = encode_jpeg(smooth(size=(96, 40)), 95), encode_jpeg(smooth(size=(48, 40)), 95)
    resized, kept = prepare([long, short], ImageOptions(max_side=48))
    assert isinstance(resized, Prepared)
    assert (resized.kept, resized.width, resized.height) == (RESIZED, 48, 20)
    assert dali_pixels(resized.jpeg).shape == (20, 48, 3)
    assert kept == Prepared(short, KEPT, 48, 40)


def without_its_end(jpeg: bytes) -> bytes:
    """The JPEG less a third of its only scan, all markers in place."""
    return jpeg[: len(jpeg) * 2 // 3].rstrip(b"\xff") + b"\xff\xd9"


@pytest.mark.parametrize("max_side", [None, 40], ids=["kept", "resized"])
def test_a_jpeg_whose_data_ends_early_is_refused_though_decoders_take_it(max_side):
    whole = encode_jpeg(smooth(), 90)
    short = without_its_end(whole)
    assert np.array_equal(dali_pixels(short), read_rgb(short))
    good, bad, last = prepare([whole, short, whole], ImageOptions(max_side=max_side))
    assert isinstance(bad, BadImage)
    assert (bad.reason, bad.message) == ("truncated-image", "the data of a scan ends before the picture does")
    assert outcome(good) == outcome(last) == (RESIZED if max_side else KEPT)


def test_a_size_other_than_expected_is_not_decoded():
    jpeg = encode_jpeg(smooth(), 90)
    seen = [pixels is not None for pixels in Decoder().decode([jpeg, jpeg], [(48, 32), (32, 48)])]
    assert seen == [True, False]


def test_structure_keeps_whole_markers_and_mends_broken_ones():
    jpeg = encode_jpeg(smooth(), 90)
    options = ImageOptions(proof="structure")
    kept, junk, cut, other = prepare([jpeg, with_junk(jpeg), jpeg[:-2], png(smooth())], options)
    assert kept == Prepared(jpeg, KEPT, 48, 32)
    assert outcome(junk) == "re-encoded:bad-structure"
    assert outcome(cut) == "reject:truncated-image"
    assert outcome(other) == "re-encoded:png"


def test_no_proof_keeps_any_common_jpeg_but_still_makes_jpeg_of_the_rest():
    jpeg = encode_jpeg(smooth(), 90)[:-2]
    rare = (FOLDER / "weird_images" / "cat_arithmetic.jpg").read_bytes()
    kept, other, mended = prepare([jpeg, png(smooth()), rare], ImageOptions(proof="none"))
    assert kept == Prepared(jpeg, KEPT, 48, 32)
    assert outcome(other) == "re-encoded:png"
    assert outcome(mended) == "re-encoded:rare-jpeg"


@pytest.mark.parametrize("proof", ["decode", "structure", "none"])
def test_red_green_and_blue_become_what_a_gpu_decodes_alike(proof):
    """A GPU takes the components of any JPEG for YCbCr: these came out in other colours there, without an error."""
    buffer = io.BytesIO()
    Image.fromarray(smooth()).save(buffer, "JPEG", quality=95, keep_rgb=True)
    (mended,) = prepare([buffer.getvalue()], ImageOptions(proof=proof))
    assert outcome(mended) == "re-encoded:rgb-jpeg"
    assert np.abs(read_rgb(mended.jpeg).astype(int) - smooth()).mean() < 2
    if proof == "decode":
        (cut,) = prepare([buffer.getvalue()[: len(buffer.getvalue()) // 2] + b"\xff\xd9"], ImageOptions(proof=proof))
        assert outcome(cut) == "reject:truncated-image"


@pytest.mark.parametrize("proof", ["structure", "none"])
def test_only_the_decode_proof_needs_dali(proof):
    class Absent(Decoder):
        def decode(self, jpegs, sizes):
            raise AssertionError("DALI was asked")

    prepare([encode_jpeg(smooth(), 90), png(smooth())], ImageOptions(proof=proof), Absent())


def test_large_pictures_are_taken_a_few_at_a_time(monkeypatch):
    counts = []

    class Watching(Decoder):
        def decode(self, jpegs, sizes):
            counts.append(len(jpegs))
            return super().decode(jpegs, sizes)

    monkeypatch.setattr("rwkvclip_cli.data.packing.prove.GROUP_PIXELS", 48 * 32 * 3)
    prepare([encode_jpeg(smooth(seed), 90) for seed in range(7)], ImageOptions(), Watching())
    assert max(counts) == 3
    assert sum(counts) == 7


def test_a_jpeg_of_very_many_scans_is_not_decoded(monkeypatch):
    buffer = io.BytesIO()
    Image.fromarray(smooth()).save(buffer, "JPEG", progressive=True)
    jpeg = buffer.getvalue()
    last = jpeg.rindex(b"\xff\xda")
    bomb = jpeg[:last] + jpeg[last:-2] * 200 + jpeg[-2:]
    # The same bytes in a comment are no scans.
    remark = jpeg[:2] + b"\xff\xfe" + (402).to_bytes(2, "big") + b"\xff\xda" * 200 + jpeg[2:]
    decoded = []
    monkeypatch.setattr(
        "rwkvclip_cli.data.packing.prove.read_rgb",
        lambda data, most: decoded.append(len(data)) or read_rgb(data, most),
    )
    results = prepare([bomb, jpeg, remark], ImageOptions())
    assert [outcome(result) for result in results] == ["reject:too-many-scans", KEPT, KEPT]
    assert len(bomb) not in decoded
    assert re.match(r"20\d scans; at most 100", str(results[0].message))


def practised(decoder: Decoder) -> Decoder:
    """A decoder that has shown equal pixels often enough."""
    pictures = [encode_jpeg(smooth(seed), 90) for seed in range(TRIALS)]
    assert {outcome(result) for result in prepare(pictures, ImageOptions(), decoder)} == {KEPT}
    return decoder


@pytest.fixture
def whole_decodes(monkeypatch) -> list[int]:
    """Lengths of what the careful reader decodes in full."""
    decoded: list[int] = []
    monkeypatch.setattr(
        "rwkvclip_cli.data.packing.prove.read_rgb",
        lambda data, most: decoded.append(len(data)) or read_rgb(data, most),
    )
    return decoded


def test_the_top_is_enough_after_equal_pixels_of_that_layout(whole_decodes):
    decoder = practised(Decoder())
    assert len(whole_decodes) == TRIALS
    one = encode_jpeg(smooth(90), 90)
    assert outcome(prepare([one], ImageOptions(), decoder)[0]) == KEPT
    assert len(whole_decodes) == TRIALS
    buffer = io.BytesIO()
    Image.fromarray(smooth(90)).save(buffer, "JPEG", quality=90)  # half as much chroma: another layout
    assert outcome(prepare([buffer.getvalue()], ImageOptions(), decoder)[0]) == KEPT
    assert len(whole_decodes) == TRIALS + 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rgb: rgb[..., ::-1],
        lambda rgb: rgb[:, ::-1],
        lambda rgb: rgb[::-1],
        lambda rgb: np.roll(rgb, 8, axis=1),
        lambda rgb: np.where(np.indices(rgb.shape)[0] < 8, 255, rgb).astype(np.uint8),
        lambda rgb: np.maximum(rgb, 2) - 2,
    ],
    ids=["colours", "mirrored", "upside down", "shifted", "one row", "darker"],
)
def test_the_top_shows_what_is_wrong_in_dali(spoil):
    class Spoilt(Decoder):
        is_spoilt = False

        def decode(self, jpegs, sizes):
            return (spoil(rgb) if self.is_spoilt else rgb for rgb in super().decode(jpegs, sizes))

        def decode_plain(self, jpegs, sizes):
            return (spoil(rgb) if self.is_spoilt else rgb for rgb in super().decode_plain(jpegs, sizes))

    decoder = practised(Spoilt())
    decoder.is_spoilt = True
    (result,) = prepare([encode_jpeg(smooth(90), 90)], ImageOptions(), decoder)
    assert outcome(result) in ("reject:not-faithful", "re-encoded:other-pixels-in-dali")


def test_missing_data_is_refused_after_many_equal_pixels_too(whole_decodes):
    decoder = practised(Decoder())
    whole = encode_jpeg(smooth(), 90)
    results = [
        prepare([short], ImageOptions(), decoder)[0] for short in (without_its_end(whole), whole[:-4] + b"\xff\xd9")
    ]
    assert [outcome(result) for result in results] == ["reject:truncated-image"] * 2


@pytest.mark.parametrize(("is_practised", "max_side"), [(False, None), (True, None), (True, 30)])
def test_data_that_is_missing_where_hardly_a_pixel_shows_is_refused(is_practised, max_side):
    """The last unit of 16 x 16 has one column and one row inside the picture: its last bits change next to nothing."""
    decoder = practised(Decoder()) if is_practised else Decoder()
    shorts = []
    for seed in range(30):
        buffer = io.BytesIO()
        noise = np.random.default_rng(seed).integers(0, 256, (17, 33, 3), np.uint8)
        Image.fromarray(noise).save(buffer, "JPEG", quality=98, subsampling=2)
        whole = buffer.getvalue()
        cuts = [whole[:-cut].rstrip(b"\xff") + b"\xff\xd9" for cut in range(3, 9)]
        shorts += [short for short in cuts if not np.array_equal(read_rgb(short), read_rgb(whole))]
    assert len(shorts) > 50
    results = prepare(shorts, ImageOptions(max_side=max_side), decoder)
    assert {outcome(result) for result in results} == {"reject:truncated-image"}


def damaged(rng: random.Random) -> bytes:
    """A noisy JPEG of some layout, with one fault of the kinds that disks, networks and programs make."""
    size = (rng.randrange(16, 160), rng.randrange(16, 160), 3)
    noise = np.random.default_rng(rng.randrange(2**32)).normal(0, 12, size)
    picture = Image.fromarray((smooth(rng.randrange(99), size[1::-1]) + noise).clip(0, 255).astype(np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = rng.choice([1, 1, 1, 6])
    buffer = io.BytesIO()
    quality, subsampling = rng.choice([30, 75, 95]), rng.choice([0, 1, 2])
    picture.save(buffer, "JPEG", quality=quality, subsampling=subsampling, exif=exif, optimize=rng.random() < 0.5)
    data = bytearray(buffer.getvalue())
    scan, frame = data.index(b"\xff\xda") + 14, data.index(b"\xff\xc0")
    at, end = rng.randrange(scan, len(data) - 2), len(data) - 2
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[rng.randrange(2, scan)] ^= 1 << rng.randrange(8)
        case 2:
            del data[at : min(end, at + rng.randrange(1, 40))]
        case 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 40)).replace(b"\xff", b"\xfe")
        case 4:
            data[at:end] = bytes(end - at)
        case 5:
            data[frame + 5 + rng.randrange(4)] ^= 1 << rng.randrange(5)
        case 6:
            data[2:2] = rng.choice([b"\xff\xdd\x00\x04\x00\x03", b"\xff\xfe\x00\x05abc", b"\xff\xe0\x00\x04ab"])
    return bytes(data)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_damage_is_judged_alike_by_the_top_and_by_every_pixel(seed):
    rng = random.Random(seed)
    decoder = Decoder()
    for subsampling in (0, 1, 2):
        buffer = io.BytesIO()
        Image.fromarray(smooth()).save(buffer, "JPEG", subsampling=subsampling)
        prepare([buffer.getvalue()] * TRIALS, ImageOptions(), decoder)
    assert sorted(decoder.equal.values()) == [TRIALS] * 3
    seen: Counter[str] = Counter()
    for _ in range(20):
        pictures = [damaged(rng) for _ in range(TRIALS - 1)]  # too few for a new decoder to trust any layout
        told = [outcome(result) for result in prepare(pictures, ImageOptions(), decoder)]
        assert told == [outcome(result) for result in prepare(pictures, ImageOptions(), Decoder())]
        seen.update(told)
    assert seen[KEPT] > 50
    assert seen["reject:truncated-image"] > 50


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_ends_in_mid_grey_lacks_nothing(mode):
    pictures = []
    for is_optimized in (False, True):
        for top in (0, 128, 255):
            grey = np.full((40, 40), 128, np.uint8)
            grey[:20] = top
            buffer = io.BytesIO()
            Image.fromarray(grey).convert(mode).save(buffer, "JPEG", optimize=is_optimized)
            pictures.append(buffer.getvalue())
    for decoder in (Decoder(), practised(Decoder())):
        results = prepare(pictures * TRIALS, ImageOptions(), decoder)
        assert {outcome(result) for result in results} == {KEPT}


def test_sharp_colours_are_compared_pixel_by_pixel(whole_decodes):
    """Chroma that changes within a block is spread over its neighbours, in DALI and in the careful pixels alike."""
    decoder = practised(Decoder())
    checks = np.zeros((48, 48, 3), np.uint8)
    checks[::3] = (255, 0, 0)
    checks[:, ::5] = (0, 0, 255)
    del whole_decodes[:]
    assert outcome(prepare([encode_jpeg(checks, 60)], ImageOptions(), decoder)[0]) == KEPT
    assert len(whole_decodes) == 1


def test_blocks_have_their_means_or_not():
    rgb = np.zeros((16, 24, 3), np.uint8)
    rgb[:8, 8:16] = (10, 20, 30)
    rgb[1, 9] = (74, 84, 94)  # one pixel of 64: a mean 1 higher
    means = np.zeros((2, 3, 3), np.uint8)
    means[0, 1] = (11, 21, 31)
    assert has_means(rgb, means)
    assert has_means(rgb[:15, :23], means)  # cut blocks count for nothing
    assert not has_means(rgb[:7], means[:1])  # nothing is left to compare
    assert not has_means(rgb, means[::-1])
    means[0, 0] = 17
    assert not has_means(rgb, means)


CODINGS = {
    "progressive": ({"progressive": True}, range(80)),
    "restart intervals": ({"restart_marker_blocks": 2}, (67,)),
}


@pytest.mark.parametrize("coding", CODINGS)
def test_last_bits_that_a_decoder_makes_up_are_missed(coding):
    """Every scan loses its last byte; where neither decoder shows that at once, it is still no whole picture."""
    options, seeds = CODINGS[coding]
    decoder = Decoder()
    unseen = 0
    for seed in seeds:
        noise = np.random.default_rng(seed).integers(0, 256, (16, 24, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, "JPEG", quality=90, **options)
        data = buffer.getvalue()
        for marker, _, end in walk_jpeg(data).segments:
            cut = data[: end - 1] + data[end:]
            if marker != SCAN_DATA or (walk := walk_jpeg(cut)).fault or is_same(read_rgb(cut), read_rgb(data)):
                continue
            if is_same(read_rgb(cut), read_rgb(lengthen_scans(walk))):
                unseen += 1
                (found,) = prepare([cut], ImageOptions(), decoder)
                assert isinstance(found, BadImage), seed
                assert found.reason == "truncated-image"
    assert unseen
