"""Packs in processes that are killed somewhere, and continues them: what the tests of `pack --resume` run by itself.

    $ python tests/pack_killed.py '{"sources": ["imgs"], "out": "out.rec", "proof": "none"}' '{}' 0.1 0.5+0.3 0.9

Each number is a moment, from 0 (the first thing that a pack does) to 1 (the last one); of `0.5+0.3` the second kill is
of the --resume that follows. The files of the second dictionary are there before. The undisturbed pack goes to a folder
`whole` beside OUT, the others to 0, 1, ... A line for each of them goes to stdout: what each process took in, as JSON.
A checkpoint follows every input.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import rwkvclip_cli.data.packing.pack as packing
import rwkvclip_cli.data.packing.pool as pool
from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError

CHANGING = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}


class Moments:
    """Counts what a process does to the file system and to its inputs, and kills it at the wanted moment."""

    def __init__(self, kill_at: int | None) -> None:
        self.count = self.taken = 0
        self.kill_at = kill_at

    def count_one(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGING or (event == "open" and isinstance(arguments[1], str) and set("wa+") & set(arguments[1])):
            self.count_one()


def run(config: PackConfig, kill_at: int | None) -> tuple[int, int, bool]:
    """Pack in a child process; its moments, the inputs that it took in, and whether it came to its end."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        moments = Moments(kill_at)
        take = packing._take

        def take_counted(*arguments: object) -> None:
            moments.count_one()
            moments.taken += 1
            os.pwrite(writes_file, f"{moments.taken}".encode(), 0)
            take(*arguments)  # type: ignore[arg-type]

        writes_file = os.open(f"{config.out}.taken", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        packing._take = take_counted
        sys.addaudithook(moments.audit)
        code = 1
        try:
            packing.pack(config)
            os.write(writes, str(moments.count).encode())
            code = 0
        except RwkvClipError as error:
            print(error.message, file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(writes)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(reads, "rb") as file:
        moments = int(file.read() or 0)
    taken_file = Path(f"{config.out}.taken")
    taken = int(taken_file.read_text() or 0)
    taken_file.unlink()
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(f"the pack failed: {status}")
    return moments, taken, status == 0


def main(options: dict[str, object], old: dict[str, str], moments: list[str]) -> None:
    packing.CHECKPOINT_EVERY_S = packing.CHECKPOINT_SHARE = 0
    pool.BATCH_SAMPLES = 2
    os.fsync = lambda descriptor: None  # only a power cut would tell, and it would take most of the tests' time
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    config = PackConfig(**made)  # type: ignore[arg-type]
    out = Path(config.out)
    config = dataclasses.replace(config, workers=1)
    (out.parent / "whole").mkdir()
    total, taken, _ = run(dataclasses.replace(config, out=str(out.parent / "whole" / out.name)), None)
    print(json.dumps([taken]), flush=True)
    for number, moment in enumerate(moments):
        here = out.parent / str(number)
        here.mkdir()
        one = dataclasses.replace(config, out=str(here / out.name))
        for name, content in old.items():
            (here / name).write_text(content)
        line = []
        for place in moment.split("+"):
            _, taken, _ = run(one, max(1, round(float(place) * total)))
            line.append(taken)
            one = dataclasses.replace(one, resume=True, workers=(2, 5, 1)[number % 3])
        _, taken, done = run(one, None)
        assert done
        print(json.dumps([*line, taken]), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
