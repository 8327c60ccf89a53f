"""Short names of what a picture shows and of what a caption says, by which the same one is known again.

>>> picture_digest(Path("cat.png").read_bytes()) == picture_digest(Path("cat.bmp").read_bytes())
True
"""

import hashlib
from array import array
from collections.abc import Iterator

import numpy as np

from rwkvclip_cli.data.packing.images import read_rgb
from rwkvclip_cli.data.packing.samples import BadImage
from rwkvclip_cli.limits import MAX_PIXELS

DIGEST_BYTES = 16
CAPTION_BYTES = 8


def picture_digest(data: bytes, max_pixels: int = MAX_PIXELS) -> bytes:
    """16 bytes that are equal for pictures of equal width, height and careful pixels, and for equal bytes.

    What the careful reader cannot decode, which `--proof none` may keep, has its bytes alone.
    """
    try:
        rgb = read_rgb(data, max_pixels)
    except BadImage:
        return hashlib.sha256(b"bytes" + data).digest()[:DIGEST_BYTES]
    found = hashlib.sha256(b"%dx%d" % rgb.shape[1::-1])
    found.update(np.ascontiguousarray(rgb).data)
    return found.digest()[:DIGEST_BYTES]


def caption_hashes(labels: "array[float]", slots: int, context_length: int) -> Iterator[bytes]:
    """8 bytes for each of the first `slots` captions of a record, from its token ids."""
    step_bytes = context_length * labels.itemsize
    view = memoryview(labels).cast("B")
    for start in range(0, slots * step_bytes, step_bytes):
        yield hashlib.blake2b(view[start : start + step_bytes], digest_size=CAPTION_BYTES).digest()
