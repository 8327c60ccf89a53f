"""All files of a pack or none: signals, kills at every point, a second pack, a disk that refuses."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pack_files import family, files_of, folder_of

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packing.output import SUFFIXES, OutputSet
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.shards import shard_names

# Packs as the command does, but stops to read on after 20 inputs until the test has done what it wants.
SLOW = """
import sys, time
import rwkvclip_cli.data.packing.pack as packing, rwkvclip_cli.data.packing.pool as pool
from rwkvclip_cli.cli import main
read = packing.Reading.items
def slowly(reading):
    for number, item in enumerate(read(reading)):
        if number == 20:
            print("half", flush=True)
            time.sleep(60)
        yield item
packing.Reading.items, pool.BATCH_SAMPLES = slowly, 1
sys.argv[0] = "rwkvclip"
main()
"""


@contextlib.contextmanager
def half_packed(source: Path, out: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """A pack in a process of its own that has written about half."""
    command = [sys.executable, "-c", SLOW, "pack", str(source), str(out), "--workers", "1", "--proof", "none", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pack_that_is_told_to_end_leaves_nothing(tmp_path, number, code):
    source = folder_of(tmp_path / "imgs", 30)
    with half_packed(source, tmp_path / "o.rec") as process:
        process.send_signal(number)
        assert process.wait(30) == code
    assert [path.name for path in tmp_path.iterdir()] == ["imgs"]


def test_a_pack_that_is_killed_leaves_nothing_under_the_final_names_and_the_next_cleans_up(tmp_path):
    source, out = folder_of(tmp_path / "imgs", 30), tmp_path / "o.rec"
    with half_packed(source, out) as process:
        _, nursery, worker = family(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    left = [path.name for path in tmp_path.iterdir() if path.name != "imgs"]
    assert left
    assert all(name.startswith(".o.") for name in left)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/stat").exists() for pid in (nursery, worker)):
        assert time.monotonic() < deadline, "a process outlived its pack"
        time.sleep(0.05)
    assert pack(PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none")).count == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["imgs", *(path.name for path in finals(out))])


def finals(out: Path) -> list[Path]:
    return [out.with_name(out.stem + suffix) for suffix in SUFFIXES.values()]


def test_a_second_pack_into_the_same_output_is_refused(tmp_path):
    source, out = folder_of(tmp_path / "imgs", 30), tmp_path / "o.rec"
    with half_packed(source, out):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(RwkvClipError, match=r"o\.rec: another pack is writing it"):
            pack(PackConfig(sources=(str(source),), out=str(out)))
        assert sorted(tmp_path.iterdir()) == before


def test_an_old_output_stays_whole_until_the_new_one_is(tmp_path):
    source, out = folder_of(tmp_path / "imgs", 30), tmp_path / "o.rec"
    pack(PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none"))
    first = files_of(out)
    with half_packed(source, out, "--overwrite") as process:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert files_of(out) == first


PLAIN = tuple(f"o{suffix}" for suffix in SUFFIXES.values())
BESIDE = ("o.manifest.json", "o.rejects.jsonl", "o.sources.tsv")


def sharded(count: int) -> tuple[str, ...]:
    """The names of a set of that many shards."""
    return (*BESIDE, *(name for number in range(count) for name in shard_names(Path("o.rec"), number)))


# Commits new files over old ones again and again, in folders 0, 1, ...: killed before the first operation on the file
# system, before the second, and so on until one comes to its end. With `again`, all are killed at the same point, and
# it is the clean-up after it that is killed at every one.
KILLED = """
import json, os, sys
from pathlib import Path
from rwkvclip_cli.data.packing.journal import Journal
from rwkvclip_cli.data.packing.output import OutputSet
from rwkvclip_cli.data.packing.reading import Position

root, old, shards, first_kill, again = Path(sys.argv[1]), json.loads(sys.argv[2]), *map(int, sys.argv[3:])

def killed_before(count, act):
    child = os.fork()
    if not child:
        def count_down(event, arguments):
            nonlocal count
            if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"):
                count -= 1
                if count < 0:
                    os._exit(9)
        output = act()
        sys.addaudithook(count_down)
        output()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

def commit(out):
    def prepare():
        output = OutputSet(str(out), overwrite=True, shard_size=7 if shards else None).__enter__()
        output.start()
        for number in range(shards or 1):
            for path in output.record_paths(number):
                path.write_text("new")
        output.rejects.write("new")
        output.sources.write("new")
        output.keep(Journal({}, "written", Position(), [], output.flush()))
        return lambda: output.commit({"count": "new"}, shards or 1)
    return prepare

number = 0
while True:
    out = root / str(number) / "o.rec"
    out.parent.mkdir()
    for name, content in old.items():
        (out.parent / name).write_text(content)
    if again:
        killed_before(first_kill, commit(out))
        if not killed_before(number, lambda: lambda: OutputSet(str(out), overwrite=True).__enter__()):
            break
    elif not killed_before(number, commit(out)):
        break
    number += 1
"""


def killed_at_every_point(
    root: Path, old: Sequence[str], shards: int = 0, first_kill: int = 0, again: bool = False
) -> list[Path]:
    """The outputs that are left, one for each point."""
    listed = [{"rec": name} for name in old if name.startswith("o-") and name.endswith(".rec")]
    contents = dict.fromkeys(old, "old") | {"o.manifest.json": json.dumps({"age": "old", "shards": listed})}
    contents = {name: contents[name] for name in old}
    arguments = [str(root), json.dumps(contents), str(shards), str(first_kill), str(int(again))]
    subprocess.run([sys.executable, "-c", KILLED, *arguments], check=True, timeout=120)
    return [root / str(number) / "o.rec" for number in range(len(list(root.iterdir())))]


def age(out: Path) -> set[str]:
    """Which packs the files under the final names are of."""
    shown = [path for path in out.parent.iterdir() if not path.name.startswith(".")]
    return {"new" if "new" in path.read_text() else "old" for path in shown}


CHANGES = {
    "whole": (PLAIN, 0),
    "without texts": (("o.idx", "o.rec"), 0),
    "without .rec": (("o.idx", "o.sources.tsv"), 0),
    "nothing": ((), 0),
    "shards to one file": (sharded(3), 0),
    "one file to shards": (PLAIN, 2),
    "to fewer shards": (sharded(3), 2),
    "to more shards": (sharded(1), 2),
    "nothing to shards": ((), 2),
}


@pytest.mark.parametrize(("old", "shards"), CHANGES.values(), ids=CHANGES)
def test_a_commit_killed_at_any_point_leaves_the_old_files_or_the_new_to_the_next_pack(tmp_path, old, shards):
    outs = killed_at_every_point(tmp_path, old, shards)
    assert len(outs) > 10 + len(old)
    found = []
    for out in outs:
        if any(name.endswith(".rec") and not name.startswith(".") for name in os.listdir(out.parent)):
            assert len(age(out)) == 1, "a .rec beside files of another pack"
        with OutputSet(str(out), overwrite=True) as output:
            found.append(age(out))
            assert (output.journal is None) == (found[-1] == {"new"}), "what could be continued is lost"
            output.forget()
            there = {path.name for path in out.parent.iterdir() if not path.name.startswith(".")}
            assert there == set((sharded(shards) if shards else PLAIN) if found[-1] == {"new"} else old)
        assert {path.name for path in out.parent.iterdir()} == there
    before = {"old"} if old else set()
    done = found.index({"new"})
    assert found == [before] * done + [{"new"}] * (len(outs) - done)
    assert 0 < done < len(outs)


@pytest.mark.parametrize(
    ("old", "shards"), [CHANGES[name] for name in ("whole", "without .rec", "to fewer shards", "one file to shards")]
)
def test_a_clean_up_killed_at_any_point_is_finished_by_the_next(tmp_path, old, shards):
    (tmp_path / "once").mkdir()
    commits = killed_at_every_point(tmp_path / "once", old, shards)
    # The latest kill that still has to be undone: all files but the last .rec are in place.
    last_rec = sharded(shards)[-2] if shards else "o.rec"
    last = max(number for number, out in enumerate(commits) if not out.with_name(last_rec).exists())
    (tmp_path / "again").mkdir()
    outs = killed_at_every_point(tmp_path / "again", old, shards, last, again=True)
    assert len(outs) > 5
    for out in outs:
        with OutputSet(str(out), overwrite=True) as output:
            assert {path.name for path in out.parent.iterdir() if not path.name.startswith(".")} == set(old)
            assert age(out) == {"old"}
            assert output.journal is not None, "what could be continued is lost"
            output.forget()
        assert len(list(out.parent.iterdir())) == len(old)


def test_without_overwrite_what_a_killed_commit_left_is_cleaned_up_all_the_same(tmp_path):
    (tmp_path / "fresh").mkdir()
    for out in killed_at_every_point(tmp_path / "fresh", []):
        if out.exists():
            continue
        with OutputSet(str(out), overwrite=False):
            assert not any(path.exists() for path in finals(out))
    (tmp_path / "old").mkdir()
    for out in killed_at_every_point(tmp_path / "old", PLAIN):
        with OutputSet(str(out), overwrite=False) as output:
            told = r"o\.\S+ exists already" if output.journal is None else "there is an unfinished pack"
            with pytest.raises(UsageError, match=told):
                output.start()
            output.forget()
        assert {path.name for path in out.parent.iterdir()} == {path.name for path in finals(out)}
        assert len(age(out)) == 1


@pytest.mark.parametrize("old_parts", [list(SUFFIXES), ["idx"], []], ids=" ".join)
def test_a_commit_that_fails_at_any_rename_leaves_the_old_files(tmp_path, monkeypatch, old_parts):
    rename = os.rename
    renames = 1 + len(old_parts) + len(SUFFIXES)
    for failing in range(renames + 1):
        out = tmp_path / str(failing) / "o.rec"
        out.parent.mkdir()
        for part in old_parts:
            out.with_name("o" + SUFFIXES[part]).write_text("old")
        done = 0

        def refuse(source, target, failing=failing):
            nonlocal done
            done += 1
            if done - 1 == failing:
                raise OSError(5, "Input/output error")
            rename(source, target)

        with OutputSet(str(out), overwrite=True) as output, monkeypatch.context() as patched:
            output.start()
            for part in ("rec", "idx"):
                output.partial[part].write_text("new")
            output.rejects.write("new")
            output.sources.write("new")
            patched.setattr(os, "rename", refuse)
            if failing == renames:
                output.commit({"count": "new"})
            else:
                with pytest.raises(RwkvClipError, match=r"cannot write .*o\.rec: Input/output error$"):
                    output.commit({"count": "new"})
        parts, ages = (SUFFIXES, {"new"}) if failing == renames else (old_parts, {"old"} if old_parts else set())
        assert {path.name for path in out.parent.iterdir()} == {"o" + SUFFIXES[part] for part in parts}
        assert age(out) == ages


def test_where_even_undoing_fails_the_error_says_where_the_old_files_are(tmp_path, monkeypatch):
    out = tmp_path / "o.rec"
    for path in finals(out):
        path.write_text("old")
    with OutputSet(str(out), overwrite=True) as output, monkeypatch.context() as patched:
        output.start()
        for part in ("rec", "idx"):
            output.partial[part].write_text("new")
        rename = os.rename

        def refuse(source, target):
            if target == output.final["sources"]:
                raise OSError(5, "Input/output error")
            rename(source, target)

        patched.setattr(os, "rename", refuse)
        patched.setattr(os, "replace", refuse)
        with pytest.raises(RwkvClipError, match=r"waits in .*\.o\.rec\.replaced for the next pack"):
            output.commit({"count": "new"})
    assert not out.exists()
    with OutputSet(str(out), overwrite=True):
        assert age(out) == {"old"}
        assert all(path.exists() for path in finals(out))


@pytest.mark.parametrize("limit", [0, 10_000, 53_000])
def test_a_full_disk_is_one_clear_error_and_the_old_files_stay(tmp_path, limit):
    source, out = folder_of(tmp_path / "imgs", 30), tmp_path / "o.rec"
    command = [sys.executable, "-m", "rwkvclip_cli", "pack", str(source), str(out), "--proof", "none", "--overwrite"]
    for path in finals(out):
        path.write_text("old")

    def bound_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    # The limit stands in for the disk: a write beyond it fails as one on a full disk does.
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=bound_files)
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["imgs", *(path.name for path in finals(out))])
    assert {path.read_text() for path in finals(out)} == {"old"}
