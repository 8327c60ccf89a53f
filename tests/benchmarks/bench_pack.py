"""`rwkvclip pack` beside its peers, in the same run: images a second, and what each is of its peer's rate.

    $ python tests/benchmarks/bench_pack.py [--images 5000] [--pictures SET.tar] [--workers 2] [--rounds 3]

Pictures of about 65 KB, three captions each, are made in a temporary folder out of those of a WebDataset tar (the
tests' demo.tar unless given): a seeded crop, enlarged to 640 by 480 or so, with a camera's grain. Then by turns, each
in a process of its own whose imports do not count, with the files in the page cache:

- DALI's CPU pipeline decodes the files on two threads, nothing more, beside `pack` with its default proof;
- a loop with `struct` writes .rec and .idx with token ids that are there, and mxnet's im2rec.py passes the files
  through with two processes, beside `pack --proof structure`;
- `pack --workers 1` beside 2.

`pack` pays for the start of its workers (`start` is what that takes), for reading captions and for every file beside
the .rec. Rates are medians. Memory is what the packing process and its workers hold at most, proportionally for what
they share (PSS), sampled.
"""

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent.parent))

from mxnet_env import MxnetUnavailableError, ensure_mxnet
from pack_files import family

DEMO = Path(__file__).parent.parent / "data" / "demo.tar"
SLOTS = 3
SIZE_BYTES = (50_000, 80_000)
GRAIN = 3.0

# Each prints the seconds that its work took, and those of processor time, its children's included.
CLOCK = """
import resource, time
def clock():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)
def since(started):
    return " ".join(str(now - then) for then, now in zip(started, clock()))
"""
PACK = """
import sys
from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.data.packing.pack import pack
folder, out, proof, workers = sys.argv[1:5]
started = clock()
pack(PackConfig(sources=(folder,), out=out, proof=proof, workers=int(workers), overwrite=True))
print(since(started))
"""
DALI = """
import glob, sys
from nvidia.dali import Pipeline, fn, types
files = sorted(glob.glob(sys.argv[1] + "/*.jpg"))
pipeline = Pipeline(batch_size=32, num_threads=2, device_id=None)
with pipeline:
    data, _ = fn.readers.file(files=files)
    pipeline.set_outputs(fn.decoders.image(data, device="cpu", output_type=types.RGB))
pipeline.build()
pipeline.run()
started = clock()
for _ in range(-(-len(files) // 32)):
    pipeline.run()
print(since(started))
"""
STRUCT = """
import glob, struct, sys
files = sorted(glob.glob(sys.argv[1] + "/*.jpg"))
tokens = [[float(49406 - n)] * 231 for n in range(10)]
started = clock()
with open(sys.argv[2], "wb") as rec, open(sys.argv[2][:-3] + "idx", "w") as idx:
    offset = 0
    for number, path in enumerate(files):
        with open(path, "rb") as file:
            image = file.read()
        payload = struct.pack("<IfQQ", 231, 0.0, number, 0) + struct.pack("<231f", *tokens[number % 10]) + image
        part = struct.pack("<II", 0xCED7230A, len(payload)) + payload + bytes(-len(payload) % 4)
        rec.write(part)
        idx.write(f"{number}\\t{offset}\\n")
        offset += len(part)
print(since(started))
"""
# im2rec.py imports OpenCV, which passing through never calls. Its list is there before the clock starts.
IM2REC = """
import glob, os, runpy, sys, types, mxnet
folder, out = sys.argv[1:3]
sys.modules["cv2"] = types.ModuleType("cv2")
script = os.path.join(os.path.dirname(mxnet.__file__), "tools", "im2rec.py")
prefix = out[:-4]
files = sorted(glob.glob(folder + "/*.jpg"))
with open(prefix + ".lst", "w") as lst:
    lst.writelines(f"{number}\\t0.0\\t{os.path.basename(path)}\\n" for number, path in enumerate(files))
sys.argv = [script, "--pass-through", "--num-thread", "2", prefix, folder]
started = clock()
runpy.run_path(script, run_name="__main__")
print(since(started))
"""


def read_pairs(tar: Path) -> list[tuple[Image.Image, list[str]]]:
    """The pictures of a WebDataset tar with their captions, repeated to SLOTS."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as archive:
        for member in archive:
            stem, _, suffix = member.name.rpartition(".")
            file = archive.extractfile(member)
            if file is not None and suffix in ("jpg", "txt", "json"):
                found.setdefault(stem, {})[suffix] = file.read()
    pairs = []
    for parts in found.values():
        captions = json.loads(parts["json"])["captions"] if "json" in parts else parts["txt"].decode().splitlines()
        pairs.append((Image.open(io.BytesIO(parts["jpg"])).convert("RGB"), (captions * SLOTS)[:SLOTS]))
    return [pair for pair in pairs if min(pair[0].size) >= 32]


def make_set(folder: Path, count: int, tar: Path) -> None:
    """Write `count` pictures and caption files; the same ones each time."""
    pairs = read_pairs(tar)
    for number in range(count):
        rng = random.Random(number)
        image, captions = pairs[rng.randrange(len(pairs))]
        (folder / f"{number:06}.jpg").write_bytes(_photograph(image, rng))
        lines = [" ".join(caption.split()) for caption in rng.sample(captions, SLOTS)]
        (folder / f"{number:06}.txt").write_text("\n".join(lines) + "\n", "utf-8")


def _photograph(image: Image.Image, rng: random.Random) -> bytes:
    """A crop of the picture as a camera would save it, near a size in bytes drawn from SIZE_BYTES."""
    width, height = rng.randrange(520, 760), rng.randrange(400, 580)
    share = rng.uniform(0.7, 1)
    crop = [min(image.width, image.height * width / height) * share, 0.0]
    crop[1] = crop[0] * height / width
    left, top = rng.uniform(0, image.width - crop[0]), rng.uniform(0, image.height - crop[1])
    box = (left, top, left + crop[0], top + crop[1])
    large = np.asarray(image.resize((width, height), Image.Resampling.LANCZOS, box=box), np.float32)
    grain = np.random.default_rng(rng.randrange(2**32)).normal(0, GRAIN, (height, width, 1)).astype(np.float32)
    picture = Image.fromarray((large + grain).clip(0, 255).astype(np.uint8))
    wanted, low, high = rng.uniform(*SIZE_BYTES), 50, 97
    tried: list[bytes] = []
    for _ in range(4):
        quality = (low + high) // 2
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=quality)
        tried.append(buffer.getvalue())
        low, high = (low, quality) if len(tried[-1]) > wanted else (quality, high)
    return min(tried, key=lambda data: abs(len(data) - wanted))


def run(program: str, *arguments: object, python: str = sys.executable) -> tuple[float, float]:
    """Seconds that a program says its work took, elapsed and of processor time."""
    command = [python, "-c", CLOCK + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    elapsed_s, processor_s = map(float, done.stdout.split()[-2:])
    return elapsed_s, processor_s


def most_memory(program: str, *arguments: object) -> int:
    """The most bytes, proportionally for shared pages (PSS), that a program and all below it hold at one time."""
    child = subprocess.Popen([sys.executable, "-c", CLOCK + program, *map(str, arguments)], stdout=-3, stderr=-3)
    most = 0
    ended = threading.Event()
    threading.Thread(target=lambda: (child.wait(), ended.set()), daemon=True).start()
    while not ended.wait(0.02):
        most = max(most, sum(map(_pss, family(child.pid))))
    return most


def _pss(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def main(images: int, pictures: Path, workers: int, rounds: int) -> None:
    """Make the set, time all sides by turns and print their medians beside each other."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "set", Path(name) / "out.rec"
        folder.mkdir()
        make_set(folder, images, pictures)
        few = Path(name) / "few"
        few.mkdir()
        make_set(few, 2, pictures)
        size_bytes = sum(path.stat().st_size for path in folder.glob("*.jpg"))
        print(f"{images:,} JPEGs of {size_bytes / images:,.0f} bytes on average, {os.cpu_count()} cores")

        sides: dict[str, Callable[[], tuple[float, float]]] = {
            "DALI decodes": lambda: run(DALI, folder),
            "pack": lambda: run(PACK, folder, out, "decode", workers),
            "pack, 1 worker": lambda: run(PACK, folder, out, "decode", 1),
            "pack of 2 pictures": lambda: run(PACK, few, out, "decode", workers),
            "struct writes": lambda: run(STRUCT, folder, out),
            "pack --proof structure": lambda: run(PACK, folder, out, "structure", workers),
            "pack --proof structure of 2 pictures": lambda: run(PACK, few, out, "structure", workers),
        }
        try:
            mxnet = str(ensure_mxnet())
            sides["im2rec.py --pass-through"] = lambda: run(IM2REC, folder, out, python=mxnet)
        except MxnetUnavailableError as error:
            print(f"no im2rec.py: {error}")
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side, work in sides.items():
                times[side].append(work())
        median = {
            side: [statistics.median(column) for column in zip(*rows, strict=True)] for side, rows in times.items()
        }

        def beside(ours: str, start: str, peer: str) -> None:
            elapsed_s, processor_s = median[ours]
            rest_s = max(1e-9, elapsed_s - median[start][0])
            print(
                f"{ours}: {images / elapsed_s:,.0f} images/s, {images / rest_s:,.0f} after a start of"
                f" {median[start][0]:.2f} s, {1000 * processor_s / images:.2f} ms of processor time each\n"
                f"    {peer}: {images / median[peer][0]:,.0f} images/s, {1000 * median[peer][1] / images:.2f} ms;"
                f" {median[peer][0] / elapsed_s:.2f} times its rate, {median[peer][0] / rest_s:.2f} after the start,"
                f" {processor_s / median[peer][1]:.2f} times its processor time"
            )

        beside("pack", "pack of 2 pictures", "DALI decodes")
        beside("pack", "pack of 2 pictures", "pack, 1 worker")
        for peer in ("struct writes", "im2rec.py --pass-through"):
            if peer in median:
                beside("pack --proof structure", "pack --proof structure of 2 pictures", peer)
        for proof in ("decode", "structure"):
            most = most_memory(PACK, folder, out, proof, workers)
            print(f"memory of pack --proof {proof} with {workers} workers: {most / 1e6:,.0f} MB at most")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--pictures", type=Path, default=DEMO)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    main(options.images, options.pictures, options.workers, options.rounds)
