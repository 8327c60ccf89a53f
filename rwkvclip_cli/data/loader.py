"""Packed records as batches on the device: DALI's mxnet reader, one pipeline an epoch and rank.

>>> for batch in TrainLoader(open_packed("pairs.rec"), spec, epoch=0): ...

B is the batch of one rank, S the image's side, T the context length. Every rank runs the same number of steps and no
record comes twice in an epoch: the records of an epoch are a window of a whole number of global batches over the set,
and the next epoch's window begins where this one ended, so what is left out moves on.
"""

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rwkvclip_cli.console import RwkvClipError, UsageError, counted, writing
from rwkvclip_cli.cores import usable_cores
from rwkvclip_cli.data.mixing import mixed
from rwkvclip_cli.data.packed import PackedSet

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)  # OpenAI CLIP's pixel statistics, of values in 0..1
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
CROP_AREA = (0.7, 1.0)
CROP_ASPECT = (0.8, 1.25)
EVAL_RESIZE = 256 / 224  # shorter side before the centre crop, as a multiple of the crop
SHUFFLE_BUFFER = 16_384  # records a rank's reader draws from
READER = "records"
OPEN_AHEAD_STEPS = 64


@dataclass(frozen=True)
class LoaderSpec:
    """What every epoch of a run's loader shares."""

    batch_size: int
    image_size: int
    rank: int = 0
    world_size: int = 1
    device_id: int | None = None  # None: the CPU pipeline
    threads: int = 1
    seed: int = 0
    num_samples: int | None = None  # records an epoch, before rounding down to whole global batches
    vocab_size: int | None = None  # of the model: token ids of records are held to it


@dataclass(frozen=True)
class Batch:
    """images (B, 3, S, S) float32, normalised; tokens (B, T) int64; records (B,) int64, their ordinals in the set."""

    images: Tensor
    tokens: Tensor
    records: np.ndarray[Any, np.dtype[np.int64]]


def steps_per_epoch(packed: PackedSet, spec: LoaderSpec) -> int:
    """Whole global batches in an epoch; an error where there is not one."""
    wanted = packed.count if spec.num_samples is None else spec.num_samples
    if wanted > packed.count:
        raise UsageError(
            f"--train-num-samples {wanted:,} is more than the {packed.count:,} records of {packed.rec}",
            hint=f"--train-num-samples {packed.count}",
        )
    global_batch = spec.batch_size * spec.world_size
    if wanted < global_batch:
        raise UsageError(
            f"{packed.rec}: {wanted:,} records an epoch do not fill one global batch of {global_batch:,} "
            f"({counted(spec.world_size, 'rank')} x {spec.batch_size})",
            hint=f"--batch-size {fitting}" if (fitting := wanted // spec.world_size) else f"at most {wanted:,} ranks",
        )
    return wanted // global_batch


def epoch_window(count: int, used: int, epoch: int) -> list[tuple[int, int]]:
    """The records of an epoch as one or two half-open ranges of ordinals, in the order in which they are read.

    Windows of `used` records follow each other around the set, so that after any number of epochs no record has been
    seen more than once more often than another.

    >>> epoch_window(10, 8, 0), epoch_window(10, 8, 1)
    ([(0, 8)], [(8, 10), (0, 6)])
    """
    start = epoch * used % count
    end = start + used
    return [(start, end)] if end <= count else [(start, count), (0, end - count)]


def caption_slots(
    records: np.ndarray[Any, np.dtype[np.int64]], *, seed: int, epoch: int, slots: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which caption each record shows in an epoch: (B,) ordinals -> (B,) slots, from (seed, epoch, record) alone.

    No rank, batch or resume changes the draw.
    """
    bits = mixed(records, seed=seed, epoch=epoch)
    return ((bits >> np.uint64(33)) % np.uint64(slots)).astype(np.int64)


def pipeline_seed(seed: int, epoch: int, rank: int) -> int:
    """Seed of one epoch's pipeline on one rank: DALI repeats its draws for equal seeds."""
    return int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1)[0] & 0x7FFFFFFF)


class TrainLoader:
    """The batches of one epoch on one rank, from the start or from a saved position.

    `state` is what `state()` returned after some batch; iteration then goes on with the next one, the shuffle and the
    augmentation as they would have been.
    """

    def __init__(self, packed: PackedSet, spec: LoaderSpec, *, epoch: int, state: bytes | None = None) -> None:
        self.packed, self.spec, self.epoch = packed, spec, epoch
        self.steps = steps_per_epoch(packed, spec)
        used = self.steps * spec.batch_size * spec.world_size
        self._pipe = _build(
            packed,
            spec,
            epoch_window(packed.count, used, epoch),
            seed=pipeline_seed(spec.seed, epoch, spec.rank),
            shard=(spec.rank + epoch) % spec.world_size,
            state=state,
        )
        # The first batches are decoded from here on, while the caller does something else.
        self._pipe.schedule_run()

    def __len__(self) -> int:
        return self.steps

    def batches(self, done: int = 0) -> Iterator[Batch]:
        """Yield the epoch's batches; `done` is how many an earlier run took before `state` was saved."""
        for step in range(done, self.steps):
            images, tokens, records = _take(self._pipe, self.packed, self.spec)
            if step + 1 < self.steps:
                self._pipe.schedule_run()
            slots = caption_slots(records, seed=self.spec.seed, epoch=self.epoch, slots=self.packed.captions)
            yield Batch(images, _choose(tokens, slots), records)

    def state(self) -> bytes:
        """The position behind the last batch that was taken, for a `TrainLoader` of the same arguments."""
        saved: bytes = self._pipe.checkpoint()
        return saved

    def close(self) -> None:
        """Free the pipeline."""
        del self._pipe


class EpochLoaders:
    """The loaders of one epoch after another; the next one is opened in a thread while its predecessor's end is used.

    Opening a pipeline takes seconds on a GPU, which short epochs would pay for at every start.
    """

    def __init__(self, packed: PackedSet, spec: LoaderSpec, *, epochs: int) -> None:
        self.packed, self.spec, self.epochs = packed, spec, epochs
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next-epoch")
        self._next: Future[TrainLoader] | None = None

    def open(self, epoch: int, state: bytes | None = None) -> TrainLoader:
        """The loader of an epoch, from the start or a saved position."""
        if self._next is not None:
            loader, self._next = self._next.result(), None
            return loader
        return TrainLoader(self.packed, self.spec, epoch=epoch, state=state)

    def open_ahead(self, epoch: int, steps_left: int) -> None:
        """Begin to open the loader behind `epoch` once few of its steps are left; call it at every step."""
        if self._next is None and epoch + 1 < self.epochs and steps_left <= OPEN_AHEAD_STEPS:
            self._next = self._thread.submit(TrainLoader, self.packed, self.spec, epoch=epoch + 1)

    def close(self) -> None:
        """Free a loader that was opened ahead and is not wanted any more."""
        self._thread.shutdown()
        if self._next is not None and self._next.exception() is None:
            self._next.result().close()


def eval_batches(packed: PackedSet, spec: LoaderSpec, *, caption_slot: int) -> Iterator[Batch]:
    """Yield every record once, in order, with one caption slot; the last batch may be short."""
    if caption_slot >= packed.captions:
        raise UsageError(
            f"--caption-slot {caption_slot}: records of {packed.rec} have slots 0 to {packed.captions - 1}"
        )
    pipe = _build(packed, spec, [(0, packed.count)], seed=0, shard=0, state=None, training=False)
    for first in range(0, packed.count, spec.batch_size):
        pipe.schedule_run()
        images, tokens, records = _take(pipe, packed, spec)
        keep = min(spec.batch_size, packed.count - first)
        yield Batch(images[:keep], tokens[:keep, caption_slot].long(), records[:keep])


def loader_threads(workers: int | None, local_world_size: int) -> int:
    """Decoder threads of a rank: as asked, else its share of the cores this process may use."""
    return workers or max(usable_cores() // local_world_size, 1)


def _build(
    packed: PackedSet,
    spec: LoaderSpec,
    window: list[tuple[int, int]],
    *,
    seed: int,
    shard: int,
    state: bytes | None,
    training: bool = True,
) -> Any:
    """The pipeline over the records in `window`: images, label floats and each record's file and place in it."""
    # DALI reads the index while the pipeline is built, and only then.
    with writing("an epoch's index", Path(tempfile.gettempdir())):
        folder = tempfile.TemporaryDirectory(prefix="rwkvclip-index-")
        index = Path(folder.name) / "epoch.idx"
        recs = packed.write_index(index, window)
    with folder:
        pipe = _define(spec, recs, index, seed=seed, shard=shard, state=state, training=training)
        try:
            pipe.build()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            if state is not None:
                raise RwkvClipError(
                    f"DALI could not go back to the saved place in {packed.rec}: {reason}",
                    hint="resume with the nvidia-dali release that saved it, or from a checkpoint at an epoch's end",
                ) from error
            raise RwkvClipError(f"DALI could not open {packed.rec}: {reason}", hint=f"ls -l {recs[0]}") from error
    return pipe


def _define(
    spec: LoaderSpec,
    recs: list[Path],
    index: Path,
    *,
    seed: int,
    shard: int,
    state: bytes | None,
    training: bool,
) -> Any:
    """The same, not built yet: `recs` are the files that `index` takes for one."""
    from nvidia.dali import Pipeline, fn, types

    on_gpu = spec.device_id is not None
    decoder = {"device": "mixed", "hw_decoder_load": 1.0} if on_gpu else {"device": "cpu"}
    pipe = Pipeline(
        batch_size=spec.batch_size,
        num_threads=spec.threads,
        device_id=spec.device_id,
        seed=seed,
        enable_checkpointing=training,
        checkpoint=state,
    )
    with pipe:
        jpegs, labels = fn.readers.mxnet(
            path=[str(rec) for rec in recs],
            index_path=[str(index)],
            num_shards=spec.world_size if training else 1,
            shard_id=shard,
            random_shuffle=training,
            # The records stay where the file is mapped; DALI's own choice sets a mebibyte aside for each of the buffer.
            tensor_init_bytes=1,
            initial_fill=SHUFFLE_BUFFER if training else spec.batch_size,
            stick_to_shard=True,
            pad_last_batch=False,
            name=READER,
        )
        place = fn.get_property(jpegs, key="source_info")
        if training:
            images = fn.decoders.image_random_crop(
                jpegs,
                **decoder,
                output_type=types.RGB,
                random_area=CROP_AREA,
                random_aspect_ratio=CROP_ASPECT,
            )
            images = fn.resize(images, size=spec.image_size, interp_type=types.INTERP_LINEAR)
            mirror = fn.random.coin_flip(probability=0.5)
        else:
            images = fn.decoders.image(jpegs, **decoder, output_type=types.RGB)
            shorter = round(spec.image_size * EVAL_RESIZE)
            images = fn.resize(images, resize_shorter=shorter, interp_type=types.INTERP_LINEAR)
            mirror = 0
        images = fn.crop_mirror_normalize(
            images,
            crop=(spec.image_size, spec.image_size),
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * value for value in CLIP_MEAN],
            std=[255 * value for value in CLIP_STD],
            mirror=mirror,
        )
        pipe.set_outputs(images, labels, place)
    return pipe


def _take(pipe: Any, packed: PackedSet, spec: LoaderSpec) -> tuple[Tensor, Tensor, np.ndarray[Any, np.dtype[np.int64]]]:
    """The next scheduled batch: images (B, 3, S, S) and label floats (B, captions, T) on the device, ordinals (B,).

    Everything is copied, since DALI fills the same memory again as soon as it is released.
    """
    try:
        images, labels, places = pipe.share_outputs()
    except RuntimeError as error:
        # DALI names neither record nor byte, and its pipeline is of no use any more.
        raise RwkvClipError(
            f"{packed.rec} holds a record that DALI cannot read: {_dali_reason(error)}",
            hint=f"rwkvclip inspect {packed.rec} --verify",
        ) from error
    records = packed.ordinals(bytes(places[i]) for i in range(len(places)))
    host_labels = torch.from_numpy(np.array(labels.as_tensor()))
    _check_tokens(host_labels, records, packed, spec)
    if spec.device_id is None:
        device_images = torch.from_numpy(np.array(images.as_tensor()))
    else:
        from nvidia.dali.plugin.pytorch import feed_ndarray

        device = torch.device("cuda", spec.device_id)
        tensor = images.as_tensor()
        device_images = torch.empty(tensor.shape(), dtype=torch.float32, device=device)
        feed_ndarray(tensor, device_images, cuda_stream=torch.cuda.current_stream(device))
        host_labels = host_labels.pin_memory().to(device, non_blocking=True)
    pipe.release_outputs()
    labels_bst = host_labels.view(-1, packed.captions, packed.context_length)
    return device_images, labels_bst, records


def _dali_reason(error: RuntimeError) -> str:
    """What happened, of the page that DALI writes about it."""
    lines = str(error).partition("encountered:")[2].split("\n")
    return next((line.strip() for line in lines if line.strip()), str(error).strip().split("\n")[0])


def _check_tokens(
    labels: Tensor, records: np.ndarray[Any, np.dtype[np.int64]], packed: PackedSet, spec: LoaderSpec
) -> None:
    """Refuse token ids that the model has no embedding for: on a GPU they would end the run without a word."""
    if spec.vocab_size is None or not labels.numel():
        return
    low, high = (float(bound) for bound in labels.aminmax())
    if low >= 0 and high < spec.vocab_size:
        return
    outside = ~((labels >= 0) & (labels < spec.vocab_size)).view(len(records), -1).all(dim=1)
    record = int(records[outside.numpy()][0])
    raise RwkvClipError(
        f"{packed.rec}: record {record} holds token ids outside the model's vocabulary of {spec.vocab_size}",
        hint=f"rwkvclip inspect {packed.rec} --verify",
    )


def _choose(labels_bst: Tensor, slots: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    """One caption a record: (B, captions, T) floats and (B,) slots -> (B, T) int64, in one gather on the device."""
    choice = torch.from_numpy(slots)
    if labels_bst.is_cuda:
        choice = choice.pin_memory().to(labels_bst.device, non_blocking=True)
    index = choice.view(-1, 1, 1).expand(-1, 1, labels_bst.shape[2])
    return labels_bst.gather(1, index).squeeze(1).long()
