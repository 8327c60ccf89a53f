"""From any picture to a JPEG that is proved to train: DALI decodes it to what the careful reader sees.

>>> prepare([Path("cat.png").read_bytes()], ImageOptions())[0].kept
're-encoded:png'
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rwkvclip_cli.data.packing.decoder import GROUP_COUNT, Decoder
from rwkvclip_cli.data.packing.images import (
    MAX_JPEG_SIDE,
    RGB,
    Header,
    encode_jpeg,
    is_same,
    read_eighth,
    read_header,
    read_rgb,
    shrink,
)
from rwkvclip_cli.data.packing.jpeg import (
    BLOCK,
    OTHER_SURPLUS,
    Probes,
    Walk,
    check_scans,
    check_structure,
    is_common,
    lengthen_scans,
    plain_size,
    probes,
    stores_rgb,
    walk_jpeg,
)
from rwkvclip_cli.data.packing.samples import BadImage
from rwkvclip_cli.limits import MAX_PIXELS

KEPT = "kept"
RESIZED = "resized"

# Mean absolute difference, of 255, within which a re-encoded picture is the same picture.
FAITHFUL_MEAN = 2.0
# Tried after --quality, until the picture is faithful: noise needs more than photographs do.
HIGHER_QUALITIES = (98, 100)

# How far the mean of a block in DALI may be from the block's own mean: on average, and anywhere. The two part where
# colours are clipped or chroma changes within a block; more than this is compared pixel by pixel. Two photographs in a
# hundred need that.
EIGHTH_MEAN = 1.0
EIGHTH_MOST = 16.0
MISSING = "the data of a scan ends before the picture does"
GREY = 128  # of libjpeg's, where data is missing
# Pictures of one layout whose every pixel has to be equal before the means of blocks are enough for further ones.
TRIALS = 16

# Pictures decoded side by side: beyond this a batch gains nothing and only holds memory, about 15 bytes a pixel.
GROUP_PIXELS = 2**20


@dataclass(frozen=True)
class ImageOptions:
    """How pictures are treated; the fields are those of `PackConfig`."""

    proof: str = "decode"
    quality: int = 95
    max_side: int | None = None
    max_pixels: int = MAX_PIXELS


@dataclass(frozen=True)
class Prepared:
    """A JPEG for a record. `kept` is KEPT (the original bytes), RESIZED, or `re-encoded:` and why.

    width, height: in pixels, as decoded; as stored (before EXIF turns it) where the proof decodes nothing.
    format: of the original picture, in small letters.
    """

    jpeg: bytes
    kept: str
    width: int
    height: int
    format: str = "jpeg"


@dataclass
class _Picture:
    """A picture on its way: `rgb` are its careful pixels, `why` says why its own bytes will not do.

    probes: of a plain JPEG.
    """

    index: int
    data: bytes
    header: Header
    walk: Walk | None
    rgb: RGB | None = None
    probes: Probes | None = None
    why: str = ""
    quality: int = 0
    jpeg: bytes = b""

    @property
    def format(self) -> str:
        return self.header.format.lower()


def prepare(
    pictures: Sequence[bytes], options: ImageOptions, decoder: Decoder | None = None
) -> list[Prepared | BadImage]:
    """Prepare each picture for a record, or say why it cannot be.

    A JPEG keeps its bytes where DALI's pixels equal the careful reader's and no scan lacks data. Where both readers
    have given equal pixels for TRIALS plain JPEGs of one layout, DALI decodes further ones with a row that they do not
    have, in which missing data shows, and the careful reader compares the means of the blocks at the top, which other
    colours, a turn or another size change. Everything else is encoded anew, and DALI's pixels of the new bytes come
    within FAITHFUL_MEAN of the careful ones; a `quality` too low for that is raised. With proof `structure` a JPEG
    keeps its bytes where its markers are whole, with `none` always; but kinds that a GPU decodes otherwise (lossless,
    arithmetic, RGB) are encoded anew whatever the proof.
    """
    decoder = decoder or Decoder()
    results: list[Prepared | BadImage | None] = [None] * len(pictures)
    group: list[_Picture] = []
    pixels = 0
    for index, data in enumerate(pictures):
        try:
            header, walk = _look(data, options.max_pixels)
            if walk:
                check_scans(walk)
        except BadImage as fault:
            results[index] = fault
            continue
        if group and (pixels + header.width * header.height > GROUP_PIXELS or len(group) == GROUP_COUNT):
            _prepare_group(group, options, decoder, results)
            group, pixels = [], 0
        group.append(_Picture(index, data, header, walk))
        pixels += header.width * header.height
    _prepare_group(group, options, decoder, results)
    return [result for result in results if result is not None]


def _look(data: bytes, max_pixels: int) -> tuple[Header, Walk | None]:
    """A picture's header and, of a JPEG, the walk; BadImage for what cannot be opened or is too large."""
    walk = walk_jpeg(data)
    size = plain_size(walk)
    if size is not None and size[0] * size[1] <= max_pixels:
        return Header("JPEG", *size), walk
    header = read_header(data, max_pixels)
    return header, walk if header.is_jpeg else None


def _prepare_group(
    group: list[_Picture], options: ImageOptions, decoder: Decoder, results: list[Prepared | BadImage | None]
) -> None:
    to_compare, to_encode = [], []
    for picture in group:
        try:
            kept = _examine(picture, options)
        except BadImage as fault:
            results[picture.index] = fault
            continue
        if kept is not None:
            results[picture.index] = kept
        elif picture.why:
            to_encode.append(picture)
        else:
            to_compare.append(picture)
    to_compare = [
        picture for picture in _without_plain(to_compare, decoder, results) if _has_pixels(picture, options, results)
    ]
    for picture, seen in zip(to_compare, _decode(decoder, to_compare, [p.data for p in to_compare]), strict=True):
        try:
            if seen is not None and _is_equal(seen, picture, decoder):
                results[picture.index] = _kept(picture, seen.shape[1], seen.shape[0])
                continue
            picture.rgb = _read_whole(picture, options)
        except BadImage as fault:
            results[picture.index] = fault
            continue
        picture.why = "re-encoded:refused-by-dali" if seen is None else "re-encoded:other-pixels-in-dali"
        to_encode.append(picture)
    _encode_all(to_encode, options, decoder, results)


def _examine(picture: _Picture, options: ImageOptions) -> Prepared | None:
    """Set `why` and the careful pixels where the bytes cannot stay; or the result, where no pixels are needed."""
    header = picture.header
    is_long = options.max_side is not None and max(header.width, header.height) > options.max_side
    walk = picture.walk
    if walk and not is_long and not is_common(walk):
        picture.why = "re-encoded:rare-jpeg"
    elif walk and not is_long and stores_rgb(walk):
        picture.why = "re-encoded:rgb-jpeg"
    elif walk and not is_long and options.proof != "decode":
        if options.proof == "none" or _is_whole(walk):
            return _kept(picture, header.width, header.height)
        picture.why = "re-encoded:bad-structure"
    elif is_long:
        picture.why = RESIZED
    elif not walk:
        picture.why = f"re-encoded:{header.format.lower()}"
    if walk and is_common(walk) and options.proof == "decode":
        picture.probes = probes(walk)
        if picture.why:
            picture.rgb = _read_whole(picture, options)
    else:
        picture.rgb = read_rgb(picture.data, options.max_pixels)
    if is_long and options.max_side is not None:
        picture.rgb = shrink(_pixels(picture), options.max_side)
    return None


def _kept(picture: _Picture, width: int, height: int) -> Prepared:
    return Prepared(picture.data, KEPT, width, height, picture.format)


def _without_plain(
    pictures: Sequence[_Picture], decoder: Decoder, results: list[Prepared | BadImage | None]
) -> list[_Picture]:
    """Keep the plain JPEGs of proven layouts that DALI and the careful reader see alike; the pictures that remain."""
    proven = []
    for picture in pictures:
        probe = picture.probes
        is_proven = probe is not None and decoder.equal[probe.layout] >= TRIALS and picture.header.is_upright
        if probe and is_proven and (means := read_eighth(probe.top)) is not None:
            proven.append((picture, probe, means))
    tallers, sizes = [probe.taller for _, probe, _ in proven], [probe.taller_size for _, probe, _ in proven]
    for (picture, probe, means), seen in zip(proven, decoder.decode_plain(tallers, sizes), strict=True):
        if seen is not None and np.any(seen[probe.below, :BLOCK] != GREY):
            width, height = picture.header.width, picture.header.height
            if has_means(seen[: min(height, len(means) * BLOCK)], means):
                results[picture.index] = _kept(picture, width, height)
    return [picture for picture in pictures if results[picture.index] is None]


def _has_pixels(picture: _Picture, options: ImageOptions, results: list[Prepared | BadImage | None]) -> bool:
    """Read the careful pixels of a JPEG that may keep its bytes; False for one that cannot be read.

    They are those of the JPEG with its scans lengthened: what DALI has to see in the JPEG as it is. So the comparison,
    which is made anyway, shows missing data too, though both are libjpeg at heart.
    """
    try:
        picture.rgb = _read_lengthened(picture, options)
    except BadImage as fault:
        results[picture.index] = fault
        return False
    return True


def _lacks_data(probe: Probes) -> bool:
    """Whether a plain JPEG's scan ends before its last unit does, parts of units that no pixel shows included."""
    means = read_eighth(probe.taller)
    if means is None or np.any(means[probe.below // BLOCK, 0] != GREY):
        return False
    # Grey may be what the scan's end gives.
    most = MAX_JPEG_SIDE**2
    rgb = read_rgb(probe.rounded, most)
    return not _is_same_before(OTHER_SURPLUS, rgb, walk_jpeg(probe.rounded), most)


def _is_same_before(surpluses: Sequence[bytes], rgb: RGB, walk: Walk, max_pixels: int) -> bool:
    """Whether a JPEG is the picture `rgb` with each surplus behind its scans; BadImage where it cannot be read."""
    return all(is_same(rgb, read_rgb(lengthen_scans(walk, surplus), max_pixels)) for surplus in surpluses)


def _is_equal(seen: RGB, picture: _Picture, decoder: Decoder) -> bool:
    """Whether DALI has seen what the careful reader sees."""
    is_equal = is_same(seen, _pixels(picture))
    if picture.probes:
        decoder.equal[picture.probes.layout] += is_equal
    return is_equal


def has_means(rgb: RGB, means: RGB) -> bool:
    """Whether the blocks of (H, W, 3) uint8 have about the means that `means` (ceil(H / 8), ceil(W / 8), 3) gives.

    Blocks that the right or lower edge cuts count for nothing; a picture without a whole one has no means.
    """
    height, width = rgb.shape[0] // BLOCK, rgb.shape[1] // BLOCK
    if height == 0 or width == 0:
        return False
    rows = rgb[: height * BLOCK, : width * BLOCK].reshape(height, BLOCK, width * BLOCK * 3)
    sums = np.add.reduce(rows, axis=1, dtype=np.uint16).astype(np.float32).reshape(height * width, BLOCK * 3)
    found = sums @ _SUM_OF_COLUMNS
    difference = np.abs(found.reshape(height, width, 3) / BLOCK**2 - means[:height, :width])
    return float(difference.mean()) <= EIGHTH_MEAN and float(difference.max()) <= EIGHTH_MOST


# From the colours of 8 pixels, one behind the other, to the sum of each colour.
_SUM_OF_COLUMNS = np.tile(np.eye(3, dtype=np.float32), (BLOCK, 1))


def _read_lengthened(picture: _Picture, options: ImageOptions) -> RGB:
    """The careful pixels of a JPEG, but other ones where a scan lacks data; BadImage where that is certain."""
    assert picture.walk is not None
    if picture.probes and _lacks_data(picture.probes):
        raise BadImage("truncated-image", MISSING)
    try:
        rgb = read_rgb(lengthen_scans(picture.walk), options.max_pixels)
    except BadImage:  # markers that are out of place: whatever is wrong, the bytes as they are tell it better
        return read_rgb(picture.data, options.max_pixels)
    # What a decoder makes up for a scan's last bits may be the picture that the surplus gives: of the cuts in the last
    # bytes of a progressive scan, 40 in 7,795. With other bits behind it 1 is left.
    if not picture.probes and not _is_same_before(OTHER_SURPLUS[:1], rgb, picture.walk, options.max_pixels):
        raise BadImage("truncated-image", MISSING)
    return rgb


def _read_whole(picture: _Picture, options: ImageOptions) -> RGB:
    """The careful pixels of a JPEG; BadImage where a scan lacks data. `rgb` may hold the lengthened ones already."""
    lengthened = _read_lengthened(picture, options) if picture.rgb is None else picture.rgb
    rgb = read_rgb(picture.data, options.max_pixels)
    if not is_same(rgb, lengthened):
        raise BadImage("truncated-image", MISSING)
    return rgb


def _is_whole(walk: Walk) -> bool:
    try:
        check_structure(walk)
    except BadImage:
        return False
    return True


def _encode_all(
    pictures: list[_Picture], options: ImageOptions, decoder: Decoder, results: list[Prepared | BadImage | None]
) -> None:
    qualities = [options.quality, *(quality for quality in HIGHER_QUALITIES if quality > options.quality)]
    for quality in qualities:
        for picture in pictures:
            try:
                picture.jpeg = encode_jpeg(_pixels(picture), quality)
            except BadImage as fault:
                results[picture.index] = fault
        pictures = [picture for picture in pictures if results[picture.index] is None]
        if options.proof == "decode":
            decoded = _decode(decoder, pictures, [picture.jpeg for picture in pictures])
            faithful = [_is_faithful(seen, picture) for seen, picture in zip(decoded, pictures, strict=True)]
        else:
            faithful = [True] * len(pictures)
        for picture, is_faithful in zip(pictures, faithful, strict=True):
            if is_faithful:
                height, width = _pixels(picture).shape[:2]
                results[picture.index] = Prepared(picture.jpeg, picture.why, width, height, picture.format)
        pictures = [picture for picture in pictures if results[picture.index] is None]
    for picture in pictures:
        results[picture.index] = BadImage(
            "not-faithful", f"no JPEG of quality up to {qualities[-1]} comes within {FAITHFUL_MEAN:g} of 255 in DALI"
        )


def _is_faithful(seen: RGB | None, picture: _Picture) -> bool:
    if seen is None:
        return False
    rgb = _pixels(picture)
    # Unsigned bytes: the larger less the smaller is the difference, without a wider copy of both.
    difference = np.maximum(seen, rgb)
    difference -= np.minimum(seen, rgb)
    return float(difference.mean(dtype=np.float64)) <= FAITHFUL_MEAN


def _decode(decoder: Decoder, pictures: Sequence[_Picture], jpegs: Sequence[bytes]) -> Iterator[RGB | None]:
    return iter(decoder.decode(jpegs, [_size(picture) for picture in pictures]) if pictures else ())


def _size(picture: _Picture) -> tuple[int, int]:
    """(W, H) as it should be decoded; one without pixels yet is upright."""
    if picture.rgb is None:
        return picture.header.width, picture.header.height
    return picture.rgb.shape[1], picture.rgb.shape[0]


def _pixels(picture: _Picture) -> RGB:
    assert picture.rgb is not None
    return picture.rgb
