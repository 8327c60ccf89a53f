"""DALI's decoder of JPEGs, as training uses it.

>>> (pixels,) = Decoder().decode([jpeg], [(48, 32)])
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rwkvclip_cli.data.packing.images import RGB

# A larger picture leaves a pipeline with more memory than it is worth to keep.
LARGE_PIXELS = 2**24
GROUP_COUNT = 16


class Decoder:
    """DALI's decoder on the CPU, the one that training uses. Holds its pipelines until a bad image spoils them.

    equal: for each layout of plain JPEG, how many DALI has decoded to the careful pixels, every one of them.
    """

    def __init__(self, batch_size: int = GROUP_COUNT) -> None:
        self.equal: Counter[bytes] = Counter()
        self._batch_size = batch_size
        self._pipelines: dict[str, Any] = {}

    def start(self) -> None:
        """Start both pipelines now. Raises RuntimeError where the system does not let them."""
        for what in ("peek", "decode"):
            self._pipelines[what] = self._build(what)

    def decode(self, jpegs: Sequence[bytes], sizes: Sequence[tuple[int, int]]) -> Iterator[RGB | None]:
        """The pixels of each JPEG, (H, W, 3) uint8; None where DALI refuses or sees another size than (W, H).

        The size is read first, so that a header that lies costs no memory. The pixels are DALI's own memory: they are
        there until the next ones are asked for.
        """
        shapes = self._run("peek", jpegs)
        fits = [
            shape is not None and tuple(shape[:2]) == (height, width)
            for shape, (width, height) in zip(shapes, sizes, strict=True)
        ]
        decoded = self._run("decode", [jpeg for jpeg, is_fitting in zip(jpegs, fits, strict=True) if is_fitting])
        for is_fitting in fits:
            yield next(decoded) if is_fitting else None
        self._let_go(sizes)

    def decode_plain(self, jpegs: Sequence[bytes], sizes: Sequence[tuple[int, int]]) -> Iterator[RGB | None]:
        """As `decode`, for JPEGs that have one frame header, of that size."""
        for rgb, (width, height) in zip(self._run("decode", jpegs), sizes, strict=True):
            yield rgb if rgb is not None and rgb.shape[:2] == (height, width) else None
        self._let_go(sizes)

    def _let_go(self, sizes: Sequence[tuple[int, int]]) -> None:
        if any(width * height > LARGE_PIXELS for width, height in sizes):
            self._pipelines.clear()  # a pipeline keeps room for the largest picture that it has seen

    def _run(self, what: str, jpegs: Sequence[bytes]) -> Iterator[Any]:
        for start in range(0, len(jpegs), self._batch_size):
            yield from self._run_batch(what, jpegs[start : start + self._batch_size])

    def _run_batch(self, what: str, jpegs: Sequence[bytes]) -> Iterator[Any]:
        """One result a JPEG, None where DALI raises. It names no culprit, so the halves are tried again."""
        # What keeps a pipeline from starting, such as a limit of threads, is no picture's fault.
        pipeline = self._pipelines.get(what) or self._build(what)
        self._pipelines[what] = pipeline
        try:
            pipeline.feed_input("jpegs", [np.frombuffer(jpeg, np.uint8) for jpeg in jpegs])
            (output,) = pipeline.run()
        except RuntimeError:
            self._pipelines.pop(what, None)  # invalid from now on
        else:
            yield from (np.asarray(output[index]) for index in range(len(jpegs)))
            return
        if len(jpegs) == 1:
            yield None
            return
        half = len(jpegs) // 2
        yield from self._run_batch(what, jpegs[:half])
        yield from self._run_batch(what, jpegs[half:])

    def _build(self, what: str) -> Any:
        from nvidia.dali import Pipeline, fn, types

        pipeline = Pipeline(
            batch_size=self._batch_size, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_async=False
        )
        with pipeline:
            jpegs = fn.external_source(name="jpegs", device="cpu")
            if what == "peek":
                pipeline.set_outputs(fn.peek_image_shape(jpegs))
            else:
                pipeline.set_outputs(fn.decoders.image(jpegs, device="cpu", output_type=types.RGB))
        pipeline.build()
        return pipeline
