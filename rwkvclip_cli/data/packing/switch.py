"""Many files put in the places of others together, or not at all, wherever it is killed.

>>> Switch(aside, target, target / ".out.rec.replaced").run(["out.idx", "out.rec"], old=["out.rec"])

No file system renames several files at once. So the old files move into a folder of their own, the .rec files first,
and then the new ones to their places, the .rec files last: a .rec never stands beside files of another set. The folder
of replaced files exists while a switch is under way and lists both sides. The last of the new files says how far it
came: once it has moved, all has, and what is left is to be removed; before, all is put back. Whoever finds that folder
does so, the switch that failed or the next pack.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# In the folder of replaced files, beside them: the names of both sides, in the order in which they move.
LISTING = "replaced.json"


@dataclass(frozen=True)
class Switch:
    """Files of the folder `aside` that go to the folder `target`; those that they replace wait in `replaced`.

    All on one file system. Methods raise OSError.
    """

    aside: Path
    target: Path
    replaced: Path

    def run(self, new: Sequence[str], old: Sequence[str]) -> None:
        """Move the files `new` to `target` and remove those of the names `old` there; where that fails, put all back.

        When it has come to its end, `aside` is gone.
        """
        last = sorted(new, key=lambda name: name.endswith(".rec"))
        first = sorted(old, key=lambda name: (name != last[-1], not name.endswith(".rec")))
        # The folder appears with its list in it, in one step.
        made = self.aside / "replaced"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        write_synced(made / LISTING, json.dumps({"new": last, "old": first}))
        sync_folder(made)
        try:
            os.rename(made, self.replaced)
            for name in first:
                os.rename(self.target / name, self.replaced / name)
            for name in last:
                os.rename(self.aside / name, self.target / name)
            sync_folder(self.target)
        finally:
            self.settle()

    def settle(self) -> None:
        """End a switch: remove what it leaves where it has come to its end, put all back where it has not.

        Killed at any point, it does the rest when called again. Without a switch under way nothing happens.
        """
        listing = self.replaced / LISTING
        if listing.exists():
            names = json.loads(listing.read_text("utf-8"))
            last = names["new"][-1]
            if os.path.lexists(self.target / last) and not os.path.lexists(self.aside / last):
                shutil.rmtree(self.aside, ignore_errors=True)
            else:
                self._undo(names["new"], names["old"])
                sync_folder(self.target)
        shutil.rmtree(self.replaced, ignore_errors=True)

    def _undo(self, new: Sequence[str], old: Sequence[str]) -> None:
        for name in reversed(new):
            moved = name not in old or os.path.lexists(self.replaced / name)
            if moved and os.path.lexists(self.target / name):
                if self.aside.is_dir():
                    os.replace(self.target / name, self.aside / name)
                else:
                    os.unlink(self.target / name)
        for name in reversed(old):
            if os.path.lexists(self.replaced / name):
                os.replace(self.replaced / name, self.target / name)


def write_synced(path: Path, text: str) -> None:
    """Write a small file and wait until it is on the disk."""
    with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
