"""Record the README's terminal pictures: the commands below run in a terminal, and what they print becomes an SVG.

    $ make pictures

The data set is drawn for it: scenes with captions, and beside them the files that real folders hold.
"""

import json
import os
import pty
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from rwkvclip_cli.demo.scenes import write_scenes

HERE = Path(__file__).parent
COLUMNS = 100
SCENES = 240
PICTURES = {
    "pack": ["rwkvclip pack photos photos.rec --dedupe --shuffle"],
    "inspect": ["rwkvclip inspect photos.rec --verify", "rwkvclip inspect photos.rec --records 0:2"],
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder / "photos")
        for picture, commands in PICTURES.items():
            shown = "\n".join(f"\x1b[1m$ {command}\x1b[0m\n{run(command, folder)}" for command in commands)
            console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
            # The picture cuts off what hangs below its last line.
            console.print(Text.from_ansi(shown.rstrip() + "\n"))
            console.save_svg(str(HERE / f"{picture}.svg"), title="rwkvclip", unique_id=picture)
            print(shown)


def prepare(folder: Path) -> None:
    """Captioned scenes, and among them what a packer has to bear with."""
    write_scenes(folder, SCENES, seed=3, held_out=False)
    draw = random.Random(3)
    images = sorted(path for path in folder.rglob("*") if path.suffix in {".jpg", ".jpeg", ".png"})
    picks = draw.sample(images, 7)

    def beside(path: Path, data: bytes, suffix: str = ".jpg") -> Path:
        copy = path.with_name(f"{path.stem}-again{suffix}")
        copy.write_bytes(data)
        copy.with_suffix(".txt").write_text(path.with_suffix(".txt").read_text())
        return copy

    beside(picks[0], picks[0].read_bytes())
    beside(picks[1], picks[1].read_bytes()[: picks[1].stat().st_size // 2])
    beside(picks[2], b"<html>404 Not Found</html>")
    beside(picks[3], b"").with_suffix(".txt").write_text("an empty download\n")
    for pick, suffix, mode in ((picks[4], ".png", "RGBA"), (picks[5], ".webp", "RGB"), (picks[6], ".tif", "CMYK")):
        with Image.open(pick) as image:
            image.convert(mode).rotate(7, fillcolor=image.convert(mode).getpixel((0, 0))).save(
                beside(pick, b"", suffix)
            )


def run(command: str, folder: Path) -> str:
    """What a command prints into a terminal, progress bars as they end."""
    arguments = [sys.executable, "-m", "rwkvclip_cli", *shlex.split(command)[1:]]
    environment = os.environ | {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stdout=theirs, stderr=theirs, stdin=theirs
    ) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # Linux says so that the other side is closed
                break
            if not chunk:
                break
            output += chunk
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"{json.dumps(arguments)} ended with {process.returncode}:\n{output.decode()}")
    return last_frames(output.decode())


def last_frames(text: str) -> str:
    """The lines that a terminal would show in the end: what a bar drew over is gone."""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = line.split("\r")[-1] if line.split("\r")[-1].strip() else line.rstrip("\r").split("\r")[-1]
        lines.append(shown)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
