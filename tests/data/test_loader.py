"""What the loader gives: every record at most once an epoch, equal steps, the same again after a resume."""

import io
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import jpeg, write_packed
from PIL import Image
from shard_files import split_set

from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.loader import (
    CLIP_MEAN,
    CLIP_STD,
    Batch,
    LoaderSpec,
    TrainLoader,
    caption_slots,
    epoch_window,
    eval_batches,
    steps_per_epoch,
)
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.data.recordio import MAGIC_BYTES, Record, RecordWriter, pack_record


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed") / "pairs.rec", 50)


@pytest.fixture(scope="module", params=[7, 50], ids=["8-shards", "1-shard"])
def sharded(request: pytest.FixtureRequest, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same records in shards."""
    return split_set(packed, request.param, tmp_path_factory.mktemp("sharded") / "out.rec")


def epoch_records(path: Path, spec_of_rank: list[LoaderSpec], epoch: int) -> list[list[int]]:
    found = []
    for spec in spec_of_rank:
        loader = TrainLoader(open_packed(path), spec, epoch=epoch)
        found.append([int(record) for batch in loader.batches() for record in batch.records])
        loader.close()
    return found


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 8), (3, 4), (2, 25)])
def test_every_rank_takes_the_same_steps_and_no_record_comes_twice(
    packed: Path, world_size: int, batch_size: int
) -> None:
    specs = [LoaderSpec(batch_size, 16, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen: Counter[int] = Counter()
    for epoch in range(3):
        per_rank = epoch_records(packed, specs, epoch)
        assert len({len(records) for records in per_rank}) == 1
        together = [record for records in per_rank for record in records]
        assert len(together) == len(set(together)) == 50 // (world_size * batch_size) * world_size * batch_size
        seen.update(together)
    # What an epoch leaves out comes in the next, so no record falls behind.
    assert max(seen.values()) - min(seen[record] for record in range(50)) <= 1


def test_epochs_and_seeds_have_orders_of_their_own(packed: Path) -> None:
    orders = [
        epoch_records(packed, [LoaderSpec(10, 16, seed=seed)], epoch)[0] for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] == epoch_records(packed, [LoaderSpec(10, 16)], 0)[0]
    assert orders[0] != sorted(orders[0])


def test_fewer_samples_an_epoch_rotate_through_the_data(packed: Path) -> None:
    spec = LoaderSpec(10, 16, num_samples=20)
    epochs = [epoch_records(packed, [spec], epoch)[0] for epoch in range(5)]
    assert [len(set(records)) for records in epochs] == [20] * 5
    assert Counter(record for records in epochs for record in records) == dict.fromkeys(range(50), 2)


def test_windows_by_hand() -> None:
    assert epoch_window(10, 4, 0) == [(0, 4)]
    assert epoch_window(10, 4, 1) == [(4, 8)]
    assert epoch_window(10, 4, 2) == [(8, 10), (0, 2)]
    assert epoch_window(10, 10, 7) == [(0, 10)]


def test_sample_counts_that_cannot_be(packed: Path) -> None:
    data = open_packed(packed)
    with pytest.raises(UsageError, match=r"--train-num-samples 51 is more than the 50 records") as error:
        steps_per_epoch(data, LoaderSpec(8, 16, num_samples=51))
    assert error.value.hint == "--train-num-samples 50"
    with pytest.raises(UsageError, match=r"do not fill one global batch of 64 \(2 ranks x 32\)") as error:
        steps_per_epoch(data, LoaderSpec(32, 16, world_size=2))
    assert error.value.hint == "--batch-size 25"


def assert_same_batches(wanted: list[Batch], found: list[Batch]) -> None:
    assert len(wanted) == len(found)
    for want, have in zip(wanted, found, strict=True):
        assert torch.equal(want.images, have.images)
        assert torch.equal(want.tokens, have.tokens)
        assert np.array_equal(want.records, have.records)


def all_batches(path: Path, spec: LoaderSpec, epoch: int) -> list[Batch]:
    loader = TrainLoader(open_packed(path), spec, epoch=epoch)
    batches = list(loader.batches())
    loader.close()
    return batches


@pytest.mark.parametrize(("world_size", "batch_size", "num_samples"), [(1, 12, None), (3, 4, None), (2, 5, 20)])
def test_shards_give_the_batches_of_the_unsharded_set(
    packed: Path, sharded: Path, world_size: int, batch_size: int, num_samples: int | None
) -> None:
    """Windows of 48 and of 20 of 50 records, of six epochs: they begin and end in the middle of shards of seven."""
    for epoch in range(6):
        seen: list[int] = []
        for rank in range(world_size):
            spec = LoaderSpec(batch_size, 16, rank=rank, world_size=world_size, num_samples=num_samples)
            found = all_batches(sharded, spec, epoch)
            assert_same_batches(all_batches(packed, spec, epoch), found)
            seen += [int(record) for batch in found for record in batch.records]
            # The record's own number, which is in its tokens, is the one that DALI's place in the files leads to.
            for batch in found:
                assert batch.tokens[:, 1].tolist() == [1 + record % 7 for record in batch.records]
        used = (num_samples or 50) // (world_size * batch_size) * world_size * batch_size
        assert len(seen) == used
        assert set(seen) == {(epoch * used + step) % 50 for step in range(used)}


def test_shards_are_evaluated_in_the_order_of_the_unsharded_set(packed: Path, sharded: Path) -> None:
    spec = LoaderSpec(16, 14)
    both = [list(eval_batches(open_packed(path), spec, caption_slot=1)) for path in (packed, sharded)]
    assert_same_batches(*both)
    assert [int(record) for batch in both[1] for record in batch.records] == list(range(50))


def test_a_place_saved_in_shards_is_taken_up_in_them_and_in_the_unsharded_set(packed: Path, sharded: Path) -> None:
    spec = LoaderSpec(12, 16, seed=5)
    for epoch in (2, 13):  # 13: the window goes around the end
        first = TrainLoader(open_packed(sharded), spec, epoch=epoch)
        batches = first.batches()
        next(batches)
        state = first.state()
        rest = list(batches)
        for path in (sharded, packed):
            again = TrainLoader(open_packed(path), spec, epoch=epoch, state=state)
            assert_same_batches(rest, list(again.batches(1)))


TAKEN_UP = """
import resource, sys
from pathlib import Path
from rwkvclip_cli.data.loader import LoaderSpec, TrainLoader
from rwkvclip_cli.data.packed import open_packed
def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
loader = TrainLoader(open_packed(sys.argv[1]), LoaderSpec(12, 16), epoch=0)
next(loader.batches())
state = loader.state()
before = address_space()
loader = TrainLoader(open_packed(sys.argv[1]), LoaderSpec(12, 16), epoch=0, state=state)
next(loader.batches(1))
print(address_space() - before)
"""


def test_a_loader_sets_no_memory_aside_that_it_never_uses(packed: Path) -> None:
    # A process that claims more than the machine has cannot fork any more.
    done = subprocess.run([sys.executable, "-c", TAKEN_UP, packed], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1 << 30


def test_without_room_for_an_index_there_is_one_error(packed: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(RwkvClipError, match="cannot write an epoch's index: No such file or directory"):
        TrainLoader(open_packed(packed), LoaderSpec(12, 16), epoch=0)


def test_one_shard_alone_is_a_set(packed: Path, sharded: Path) -> None:
    last = sorted(sharded.parent.glob("out-*.rec"))[-1]
    (batch,) = eval_batches(open_packed(last), LoaderSpec(64, 14), caption_slot=0)
    first = 50 - len(batch.records)
    assert batch.records.tolist() == list(range(50 - first))
    assert batch.tokens[:, 0].tolist() == [1 + 3 * record for record in range(first, 50)]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_saved_position_goes_on_with_the_same_pixels(packed: Path, taken: int) -> None:
    # 50 records, batches of 12: the window makes DALI read an index of its own.
    spec = LoaderSpec(12, 16, seed=5)
    first = TrainLoader(open_packed(packed), spec, epoch=2)
    batches = first.batches()
    for _ in range(taken):
        next(batches)
    state = first.state()
    rest = list(batches)
    again = TrainLoader(open_packed(packed), spec, epoch=2, state=state)
    resumed = list(again.batches(taken))
    assert len(rest) == 4 - taken
    assert_same_batches(rest, resumed)


def test_captions_belong_to_their_record_and_come_from_seed_epoch_and_record(packed: Path) -> None:
    spec = LoaderSpec(25, 16, seed=3)
    loader = TrainLoader(open_packed(packed), spec, epoch=1)
    for batch in loader.batches():
        slots = caption_slots(batch.records, seed=3, epoch=1, slots=3)
        assert batch.tokens.dtype == torch.int64
        assert batch.tokens[:, 0].tolist() == [1 + (3 * r + s) % 511 for r, s in zip(batch.records, slots, strict=True)]
        assert batch.tokens[:, 1].tolist() == [1 + r % 7 for r in batch.records]


def test_caption_draws_are_even_and_independent_between_epochs() -> None:
    records = np.arange(90_000)
    one, two = (caption_slots(records, seed=0, epoch=epoch, slots=3) for epoch in (0, 1))
    # 9 cells of 10,000: four standard deviations are 4 * sqrt(10,000 * 8 / 9) = 377.
    assert np.all(np.abs(np.bincount(one * 3 + two, minlength=9) - 10_000) < 377)
    assert caption_slots(np.array([7]), seed=0, epoch=0, slots=1).tolist() == [0]


def test_evaluation_shows_the_centre_of_every_record_once_in_order(packed: Path) -> None:
    batches = list(eval_batches(open_packed(packed), LoaderSpec(16, 14), caption_slot=2))
    assert [len(batch.records) for batch in batches] == [16, 16, 16, 2]
    assert [int(record) for batch in batches for record in batch.records] == list(range(50))
    assert batches[3].tokens[:, 0].tolist() == [1 + (3 * 48 + 2) % 511, 1 + (3 * 49 + 2) % 511]
    # 20 x 16 pixels become 20 x 16: the shorter side is 14 * 256 / 224 = 16 already, so only the crop is left.
    pixels = np.asarray(Image.open(io.BytesIO(jpeg(0))).convert("RGB"), dtype=np.float32)[1:15, 3:17]
    expected = (pixels / 255 - np.array(CLIP_MEAN)) / np.array(CLIP_STD)
    np.testing.assert_allclose(batches[0].images[0].permute(1, 2, 0).numpy(), expected, atol=2e-2)


def test_evaluation_of_a_slot_that_is_not_there(packed: Path) -> None:
    with pytest.raises(UsageError, match="slots 0 to 2"):
        next(eval_batches(open_packed(packed), LoaderSpec(4, 16), caption_slot=3))


def test_training_images_are_cropped_and_mirrored(tmp_path: Path) -> None:
    """A picture of a red left and a blue right half: both orientations occur, and the border between them moves."""
    picture = Image.new("RGB", (96, 96), "red")
    picture.paste("blue", (48, 0, 96, 96))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=95, subsampling=0)
    with RecordWriter(tmp_path / "one.rec") as writer:
        writer.write(pack_record(Record([0.0] * 231, buffer.getvalue())))
    data = open_packed(tmp_path / "one.rec")
    mirrored, borders = [], []
    for seed in range(24):
        loader = TrainLoader(data, LoaderSpec(1, 64, seed=seed), epoch=0)
        image = next(loader.batches()).images[0]
        assert image.shape == (3, 64, 64)
        assert image.dtype == torch.float32
        is_red = image[0] > image[2]
        mirrored.append(not is_red[0, 0])
        borders.append(int(is_red[0].sum()))
    assert 4 <= sum(mirrored) <= 20
    assert len(set(borders)) >= 6
    # At least sqrt(0.7 x 0.8) of the width is seen, so the border stays within a third of the middle.
    assert all(64 / 3 - 1 <= border <= 128 / 3 + 1 for border in borders)


def test_split_records_keep_their_identity(tmp_path: Path) -> None:
    """A comment segment holds the magic word at an aligned place, so the record is split; it is still known."""
    path = tmp_path / "split.rec"
    with RecordWriter(path) as writer:
        for ordinal in range(8):
            image = jpeg(ordinal)
            head = 24 + 4 * 48
            comment = b"\0" * (-(head + 6) % 4) + MAGIC_BYTES * 3
            segment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
            labels = [float(ordinal)] * 48
            writer.write(pack_record(Record(labels, image[:2] + segment + image[2:], ordinal)))
    path.with_suffix(".manifest.json").write_text('{"count": 8, "captions": 3, "context_length": 16}')
    loader = TrainLoader(open_packed(path), LoaderSpec(4, 16), epoch=0)
    for batch in loader.batches():
        assert batch.tokens[:, 0].tolist() == batch.records.tolist()


@pytest.mark.gpu
def test_the_gpu_pipeline_gives_the_cpu_pipelines_records_tokens_and_nearly_its_pixels(packed: Path) -> None:
    both = []
    for device_id in (None, 0):
        spec = LoaderSpec(10, 16, device_id=device_id, seed=2)
        loader = TrainLoader(open_packed(packed), spec, epoch=1)
        both.append(list(loader.batches()))
    for cpu, gpu in zip(*both, strict=True):
        assert gpu.images.is_cuda
        assert gpu.tokens.is_cuda
        assert np.array_equal(cpu.records, gpu.records)
        assert torch.equal(cpu.tokens, gpu.tokens.cpu())
    evaluated = [
        next(eval_batches(open_packed(packed), LoaderSpec(16, 14, device_id=d), caption_slot=0)) for d in (None, 0)
    ]
    # Another JPEG decoder and another resize: a few levels of 255, over a standard deviation of about 68.
    assert (evaluated[0].images - evaluated[1].images.cpu()).abs().mean() < 0.05


@pytest.mark.gpu
def test_a_saved_position_goes_on_with_the_same_pixels_on_the_gpu(packed: Path) -> None:
    spec = LoaderSpec(12, 16, device_id=0, seed=5)
    first = TrainLoader(open_packed(packed), spec, epoch=2)
    batches = first.batches()
    next(batches)
    state = first.state()
    rest = list(batches)
    resumed = list(TrainLoader(open_packed(packed), spec, epoch=2, state=state).batches(1))
    assert [batch.records.tolist() for batch in rest] == [batch.records.tolist() for batch in resumed]
    assert all(torch.equal(one.images, two.images) for one, two in zip(rest, resumed, strict=True))


@pytest.mark.parametrize(
    ("start", "reason"), [(b"\xff\xd8", "nvImageCodec failure"), (MAGIC_BYTES, "wrong magic number")]
)
def test_a_damaged_record_ends_in_two_lines(tmp_path: Path, start: bytes, reason: str) -> None:
    rec = write_packed(tmp_path / "pairs.rec", 20)
    data = bytearray(rec.read_bytes())
    packed = open_packed(rec)  # before the damage, which it might see
    at = data.index(start, int(packed.offsets[7]))
    data[at : at + 60] = bytes(60)
    rec.write_bytes(data)
    loader = TrainLoader(packed, LoaderSpec(10, 16), epoch=0)
    with pytest.raises(RwkvClipError, match=f"pairs.rec holds a record that DALI cannot read: .*{reason}") as caught:
        list(loader.batches())
    assert "\n" not in caught.value.message
    assert caught.value.hint == f"rwkvclip inspect {rec} --verify"
    loader.close()


@pytest.mark.parametrize("token", [-1.0, 512.0])
def test_token_ids_outside_the_vocabulary_are_named(tmp_path: Path, token: float) -> None:
    rec = write_packed(tmp_path / "pairs.rec", 9)
    with RecordWriter(rec, sync=False) as writer:
        for ordinal in range(10):
            labels = [5.0] * (3 * 16)
            labels[20] = token if ordinal == 6 else 511.0
            writer.write(pack_record(Record(labels, jpeg(ordinal), ordinal)))
    manifest = rec.with_suffix(".manifest.json")
    manifest.write_text(manifest.read_text().replace('"count": 9', '"count": 10'))
    spec = LoaderSpec(5, 16, vocab_size=512)
    with pytest.raises(RwkvClipError, match="record 6 holds token ids outside the model's vocabulary of 512"):
        list(eval_batches(open_packed(rec), spec, caption_slot=0))
    assert len(list(eval_batches(open_packed(rec), LoaderSpec(5, 16), caption_slot=0))) == 2
