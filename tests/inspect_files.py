"""What the tests of inspection share: a small set as pack writes it, copies to damage, and a proof in this process.

>>> damaged = copy_set(packed, tmp_path)
>>> flip_bit(damaged, 2000, 3)
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rwkvclip_cli.data.packing.decoder import Decoder
from rwkvclip_cli.data.packing.output import SUFFIXES
from rwkvclip_cli.data.packing.pool import Outcome
from rwkvclip_cli.data.packing.samples import Ignored, Item, Sample
from rwkvclip_cli.data.packing.worker import WorkerOptions, pack_samples
from rwkvclip_cli.data.recordio import HEADER_BYTES, RecordReader
from rwkvclip_cli.data.shards import locate
from rwkvclip_cli.inspect.files import read_beside
from rwkvclip_cli.inspect.salvage import Salvaged, salvage
from rwkvclip_cli.inspect.verify import Verdict, verify

Prove = Callable[[Iterable[Item]], Iterator[Outcome]]


def proof_in_process() -> Prove:
    """The proof that pack runs, without processes: tests damage no image so that a decoder would die of it."""
    decoder, options = Decoder(), WorkerOptions()

    def prove(items: Iterable[Item]) -> Iterator[Outcome]:
        for item in items:
            if isinstance(item, Sample):
                yield from pack_samples([item], options, decoder)
            else:
                assert isinstance(item, Ignored)
                yield item

    return prove


def copy_set(rec: Path, folder: Path, parts: Iterable[str] = SUFFIXES) -> Path:
    """A copy of the set's files, of some `parts` alone, under the same names."""
    for part in parts:
        name = rec.stem + SUFFIXES[part]
        shutil.copyfile(rec.with_name(name), folder / name)
    return folder / rec.name


def flip_bit(rec: Path, byte: int, bit: int) -> None:
    """Turn one bit of the file over."""
    data = bytearray(rec.read_bytes())
    data[byte] ^= 1 << bit
    rec.write_bytes(data)


def verified(rec: Path, prove: Prove | None) -> Verdict:
    return verify(read_beside(locate(rec)), prove)


def salvaged(rec: Path, prove: Prove | None, out: Path) -> Salvaged:
    return salvage(read_beside(locate(rec)), prove, str(out))


def bodies(rec: Path) -> list[bytes]:
    """Labels and image of each record, without the header, whose number salvage writes anew."""
    with RecordReader(rec) as reader:
        return [payload[HEADER_BYTES:] for payload in reader]


def offsets(rec: Path) -> list[int]:
    return [int(line.split("\t")[1]) for line in rec.with_suffix(".idx").read_text().splitlines()]
