"""What the tests of packing share: small sources, and what was read or written.

>>> folder_of(tmp_path / "imgs", 3)  # 000.jpg, 000.txt, ...
"""

import contextlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rwkvclip_cli.data.captions import clean_captions
from rwkvclip_cli.data.packing.images import encode_jpeg
from rwkvclip_cli.data.packing.output import SUFFIXES
from rwkvclip_cli.data.packing.samples import REASONS, Item, Reject, Sample, find_captions


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write small files below a folder and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_tar(path: Path, files: list[tuple[str, bytes]], mode: str = "w", **options: object) -> Path:
    """Write a tar of the files in that order."""
    with tarfile.open(path, mode, **options) as tar:  # type: ignore[call-overload]
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def told(items: list[Item], root: Path) -> list[tuple[str, object]]:
    """Each item as (source below root, its captions or its reason)."""
    found: list[tuple[str, object]] = []
    for item in items:
        source = item.source.removeprefix(f"{root}/")
        if isinstance(item, Sample):
            found.append((source, clean_captions(find_captions(item))))
        elif isinstance(item, Reject):
            assert item.reason in REASONS
            assert item.message
            found.append((source, item.reason))
        else:
            found.append((source, "ignored"))
    return found


def smooth(seed: int = 0, size: tuple[int, int] = (48, 32)) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    """Pixels (height, width, 3) that JPEG takes well, others for each seed."""
    x, y = np.meshgrid(np.linspace(0, 3, size[0]), np.linspace(0, 2, size[1]))
    waves = [np.sin(x * (1 + channel) + y + seed) for channel in range(3)]
    return np.rint(127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8)


def photo(seed: int = 0, size: tuple[int, int] = (48, 32)) -> bytes:
    """The same as a JPEG."""
    return encode_jpeg(smooth(seed, size), 90)


def folder_of(root: Path, count: int) -> Path:
    """A folder of `count` photographs with captions."""
    root.mkdir()
    for number in range(count):
        (root / f"{number:03}.jpg").write_bytes(photo(number))
        (root / f"{number:03}.txt").write_text(f"picture {number}")
    return root


def family(pid: int) -> list[int]:
    """A process and all below it, the nearest first: a pack, its nursery, its workers. Those that are left of it."""
    found = [pid]
    for member in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{member}/task/{member}/children").read_text().split())
    return found


def open_descriptors() -> dict[str, str]:
    """What this process has open, by number."""
    return {path.name: os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def files_of(out: Path) -> dict[str, bytes]:
    return {part: out.with_name(out.stem + suffix).read_bytes() for part, suffix in SUFFIXES.items()}


# Runs a command that, before it reads the input of the number that comes first, waits for a line on stdin; so does a
# pack that has that many inputs in all. A checkpoint follows every input.
HALTING = """
import sys
import rwkvclip_cli.data.packing.pack as packing, rwkvclip_cli.data.packing.pool as pool
from rwkvclip_cli.cli import main
halt_at = int(sys.argv.pop(1))
read = packing.Reading.items
def halt():
    print("half", flush=True)
    sys.stdin.readline()
def halting(reading):
    number = -1
    for number, item in enumerate(read(reading)):
        if number == halt_at:
            halt()
        yield item
    if number + 1 == halt_at:
        halt()
packing.Reading.items, pool.BATCH_SAMPLES = halting, 1
packing.CHECKPOINT_EVERY_S = packing.CHECKPOINT_SHARE = 0
sys.argv[0] = "rwkvclip"
main()
"""


class Halted:
    """A pack in a process of its own that has taken in about as many inputs as it was told, and waits."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def go_on(self) -> tuple[int, str, str]:
        """Let it read on; its exit code, what it printed and what it said."""
        result, log = self.process.communicate("\n", timeout=60)
        return self.process.returncode, result, log

    def end(self, number: int) -> tuple[int, str, str]:
        """Send it a signal; the same."""
        self.process.send_signal(number)
        result, log = self.process.communicate(timeout=60)
        return self.process.returncode, result, log


@contextlib.contextmanager
def halted(number: int, source: Path, out: Path, *options: str, workers: int = 1) -> Iterator[Halted]:
    """`rwkvclip pack SOURCE OUT` that waits before the input of that number."""
    command = [sys.executable, "-c", HALTING, str(number), "pack", str(source), str(out), "--proof", "none"]
    command += ["--workers", str(workers), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n", process.stderr and process.stderr.read()
            yield Halted(process)
        finally:
            process.kill()
