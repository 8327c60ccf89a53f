"""Files with many things wrong at once: every mode ends with a report or one clear error, never with a traceback."""

import contextlib
import random
import struct
from pathlib import Path

import pytest
from inspect_files import copy_set, verified
from shard_files import split_set

from rwkvclip_cli.config import InspectConfig
from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.recordio import MAGIC, MAGIC_BYTES
from rwkvclip_cli.inspect import inspect_data

INSERTED = (MAGIC_BYTES, b"\n", b"\t", b'"', b"1e999", b"-1", b"null", bytes(50))


def mangle(data: bytes, draw: random.Random) -> bytes:
    """Bytes changed, removed, put in or cut off, at one place or at many."""
    mangled = bytearray(data)
    for _ in range(draw.choice((1, 3, 30))):
        if not mangled:
            break
        place = draw.randrange(len(mangled))
        kind = draw.random()
        if kind < 0.5:
            mangled[place] = draw.randrange(256)
        elif kind < 0.7:
            del mangled[place : place + draw.randint(1, 2000)]
        elif kind < 0.9:
            mangled[place:place] = draw.choice(INSERTED)
        else:
            del mangled[place:]
    return bytes(mangled)


def check_every_mode(rec: Path, seed: int) -> None:
    draw, folder = random.Random(seed), rec.parent
    for path in draw.sample(sorted(folder.iterdir()), draw.randint(1, 3)):
        path.write_bytes(mangle(path.read_bytes(), draw))
    modes: list[dict[str, object]] = [
        {},
        {"records": ":"},
        {"verify": True},
        {"salvage": str(folder / "saved.rec")},
        {"export": str(folder / "folder")},
        {"plan": True, "batch_size": 2},
        {"rebuild_index": True},
    ]
    for mode in modes:
        with contextlib.suppress(RwkvClipError):
            assert inspect_data(InspectConfig(data=str(rec), proof="none", **mode)).text
    if (folder / "saved.rec").exists():
        assert verified(folder / "saved.rec", None).is_sound


@pytest.mark.parametrize("seed", range(15))
def test_mangled_files(packed, tmp_path, seed) -> None:
    check_every_mode(copy_set(packed, tmp_path), seed)


@pytest.mark.parametrize("seed", range(15))
def test_mangled_shards(packed, tmp_path, seed) -> None:
    check_every_mode(split_set(packed, 3, tmp_path / "pairs.rec"), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15, 300))
def test_many_mangled_files(packed, tmp_path, seed) -> None:
    check_every_mode(copy_set(packed, tmp_path), seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15, 300))
def test_many_mangled_shards(packed, tmp_path, seed) -> None:
    check_every_mode(split_set(packed, 3, tmp_path / "pairs.rec"), seed)


def test_heads_that_all_reach_to_the_end_cost_no_more_than_their_number(tmp_path) -> None:
    """Read whole at each head, these 256 KiB would be 4 GiB."""
    size = 1 << 18
    rec = tmp_path / "a.rec"
    rec.write_bytes(b"".join(struct.pack("<II", MAGIC, size - at - 8) for at in range(0, size, 8)))
    verdict = verified(rec, None)
    assert (verdict.records, verdict.log.counts["framing"]) == (0, 1)
    assert "another part begins within it, at byte 8" in verdict.log.first[-1].message
