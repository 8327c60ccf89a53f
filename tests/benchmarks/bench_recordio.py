"""Records per second of processor time: this package's writer and reader beside those of mxnet 1.9.1, in the same run.

    $ python tests/benchmarks/bench_recordio.py [RECORDS [BYTES]]

Each round writes the same random payloads (5,000 of 65,000 bytes unless said otherwise) into a temporary folder, then
reads them back in order from the page cache. Processor time, not elapsed: how fast the disk takes the pages is no merit
of either side, and it differs between rounds.
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from mxnet_env import ensure_mxnet

from rwkvclip_cli.data.recordio import RecordReader, RecordWriter

ROUNDS = 3
DISTINCT = 64
# The other side runs in its own interpreter and times itself, so that neither pays for the other's imports.
MXNET_SIDE = """
import random, sys, time, mxnet
folder, count, size, distinct = sys.argv[1], *map(int, sys.argv[2:])
payloads = [random.Random(n).randbytes(size) for n in range(distinct)]
started = time.process_time()
writer = mxnet.recordio.MXIndexedRecordIO(folder + "/theirs.idx", folder + "/theirs.rec", "w")
for n in range(count):
    writer.write_idx(n, payloads[n % distinct])
writer.close()
written = time.process_time()
reader = mxnet.recordio.MXIndexedRecordIO(folder + "/theirs.idx", folder + "/theirs.rec", "r")
total = sum(len(reader.read_idx(n)) for n in reader.keys)
assert total == count * size
print(written - started, time.process_time() - written)
"""


def time_ours(folder: Path, count: int, size: int) -> tuple[float, float]:
    """Processor seconds to write and to read `count` records of `size` bytes."""
    payloads = [random.Random(n).randbytes(size) for n in range(DISTINCT)]
    started = time.process_time()
    with RecordWriter(folder / "ours.rec", sync=False) as writer:
        for n in range(count):
            writer.write(payloads[n % DISTINCT])
    written = time.process_time()
    with RecordReader(folder / "ours.rec") as reader:
        assert sum(map(len, reader)) == count * size
    return written - started, time.process_time() - written


def time_theirs(folder: Path, count: int, size: int) -> tuple[float, float]:
    """The same through mxnet."""
    command = [str(ensure_mxnet()), "-c", MXNET_SIDE, str(folder), str(count), str(size), str(DISTINCT)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(output[-2]), float(output[-1])


def main(count: int = 5000, size: int = 65_000) -> None:
    """Time both by turns, compare the files, and print the best round of each."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ours.append(time_ours(folder, count, size))
            theirs.append(time_theirs(folder, count, size))
            for suffix in ("rec", "idx"):
                if (folder / f"ours.{suffix}").read_bytes() != (folder / f"theirs.{suffix}").read_bytes():
                    sys.exit(f"the two .{suffix} files differ: no figure means anything")
    for place, what in enumerate(("write", "read")):
        our_s, their_s = min(times[place] for times in ours), min(times[place] for times in theirs)
        print(
            f"{what}: rwkvclip {count / our_s:,.0f} records/s ({count * size / our_s / 1e6:,.0f} MB/s),"
            f" mxnet {count / their_s:,.0f}: {their_s / our_s:.2f} times"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
