"""What can happen to a running pack: signals, a disk that refuses, sources that change, vanish or cannot be read."""

import dataclasses
import functools
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import run_cli
from pack_files import HALTING, SUFFIXES, family, files_of, folder_of, halted, open_descriptors, photo, write, write_tar

import rwkvclip_cli.data.packing.pack as packing
from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError, UsageError
from rwkvclip_cli.data.packing.journal import Journal
from rwkvclip_cli.data.packing.output import OutputSet
from rwkvclip_cli.data.packing.pack import pack

COUNT = 30
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
EIO = Path("/proc/self/mem")  # opens, and gives an input/output error to whoever reads


def undisturbed(source: Path, **options: object) -> dict[str, bytes]:
    """The files of the same pack in one go."""
    out = source.with_name("whole.rec")
    config = PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none")
    pack(dataclasses.replace(config, **options))  # type: ignore[arg-type]
    return files_of(out)


def resumed(source: Path, out: Path, **options: object) -> dict[str, bytes]:
    """The files of the pack that --resume brings to its end."""
    config = PackConfig(sources=(str(source),), out=str(out), workers=2, proof="none", resume=True)
    pack(dataclasses.replace(config, **options))  # type: ignore[arg-type]
    left = sorted(path.name for path in out.parent.iterdir() if path.name.startswith((".", "o.")))
    assert left == sorted(out.stem + suffix for suffix in SUFFIXES.values())
    return files_of(out)


def rejects(out: Path) -> dict[str, str]:
    """Reason by file name."""
    lines = map(json.loads, out.with_suffix(".rejects.jsonl").read_text().splitlines())
    return {Path(line["source"]).name: line["reason"] for line in lines}


def shown(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pack_that_is_told_to_end_says_how_to_go_on(tmp_path, number, code):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    with halted(20, source, out) as pack_:
        exit_code, result, log = pack_.end(number)
    assert (exit_code, result) == (code, "")
    kept, command = log.splitlines()[0].split("; to continue: ")
    count = int(kept.removesuffix(" records are kept"))
    assert 10 <= count <= 20
    assert shlex.split(command) == shlex.split(f"rwkvclip pack {source} {out} --proof none --workers 1 --resume")
    assert "Traceback" not in log
    assert shown(tmp_path) == ["imgs"]
    done = run_cli(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    assert f"continuing {out} after {count} records and 0 rejects" in done.stderr
    assert files_of(out) == undisturbed(source)


def test_an_unfinished_pack_is_thrown_away_with_overwrite_alone_and_in_so_many_words(tmp_path, capsys):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    (source / "000a.jpg").write_bytes(photo())  # without a caption
    with halted(20, source, out) as pack_:
        pack_.end(signal.SIGKILL)
    partial = tmp_path / ".o.rec.partial"
    kept = {path: path.read_bytes() for path in partial.iterdir()}
    written = time.localtime((partial / "journal.json").stat().st_mtime)
    command = ["pack", str(source), str(out), "--proof", "none", "--workers", "1"]
    done = run_cli(*command)
    assert (done.returncode, done.stdout) == (2, "")
    fault, hint = done.stderr.splitlines()
    count = json.loads((partial / "journal.json").read_text().partition(" ")[2])["tally"]["count"]
    assert fault == (
        f"rwkvclip: {out}: there is an unfinished pack of {count} records and 1 reject, last written at "
        f"{time.strftime('%Y-%m-%d %H:%M', written)}"
    )
    assert hint == f"  try: rwkvclip {' '.join(command)} --resume continues it, --overwrite throws it away"
    config = PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none", overwrite=True)
    with pytest.raises(UsageError, match="no such folder or file"):
        pack(dataclasses.replace(config, sources=(f"{source}x",)))
    assert {path: path.read_bytes() for path in partial.iterdir()} == kept, "a mistyped command threw the work away"
    pack(config)
    assert f"--overwrite: an unfinished pack of {out} ({count} records) is thrown away" in capsys.readouterr().err
    assert files_of(out) == undisturbed(source)
    assert not partial.exists()


def test_an_unfinished_pack_over_an_old_set_is_told_before_the_old_set(tmp_path):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    out.write_text("old")
    with halted(20, source, out, "--overwrite") as pack_:
        pack_.end(signal.SIGKILL)
    with pytest.raises(UsageError, match="there is an unfinished pack of"):
        pack(PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none"))


def test_resume_without_anything_to_resume_says_so_and_packs(tmp_path, capsys):
    source, out = folder_of(tmp_path / "imgs", 3), tmp_path / "o.rec"
    assert resumed(source, out) == undisturbed(source)
    said = capsys.readouterr().err
    assert f"--resume: there is no unfinished pack of {out}; starting from the beginning" in said


def test_resume_of_a_finished_pack_says_so_and_changes_nothing(tmp_path, capsys):
    source, out = folder_of(tmp_path / "imgs", 3), tmp_path / "o.rec"
    (source / "alone.jpg").write_bytes(b"no caption")
    first = pack(PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none"))
    shutil.rmtree(source)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = PackConfig(sources=(str(source),), out=str(out), proof="none", resume=True)
    assert pack(again) == first
    said = capsys.readouterr().err
    assert f"{out} is complete already" in said
    assert f"warning: {source}: no such folder or file\n" in said
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    folder_of(source, 3)
    for other in ({"quality": 90}, {"shuffle": True}, {"shard_size": 2}, {"captions": 2}):
        with pytest.raises(UsageError, match=r"o\.rec is complete already; it has \w+ "):
            pack(dataclasses.replace(again, **other))
    out.write_bytes(out.read_bytes()[:-4])
    with pytest.raises(UsageError, match=r"o\.\S+ exists already"):
        pack(again)


def later(path: Path) -> None:
    """Have a file changed an hour from now."""
    os.utime(path, (time.time() + 3600,) * 2)


def replace_by_an_older_one(path: Path) -> None:
    """Put a file there that has lain elsewhere since long before the pack."""
    other = path.with_name(".other")
    other.write_bytes(path.read_bytes())
    os.utime(other, (1e9, 1e9))
    other.rename(path)


SINCE = {
    "nothing": (lambda source: None, ""),
    "a hidden file": (lambda source: later(write(source, {".seen": "x"}) / ".seen"), ""),
    "a caption": (lambda source: later(source / "001.txt"), "{source}/001.txt has changed since"),
    "a picture": (lambda source: later(source / "001.jpg"), "{source}/001.jpg has changed since"),
    "an older picture": (
        lambda source: replace_by_an_older_one(source / "001.jpg"),
        "{source}/001.jpg was replaced since, or its name or permissions were changed",
    ),
    "one more": (
        lambda source: [os.utime(write(source, {name: b"x"}) / name, (0, 0)) for name in ("9.jpg", "9.txt")],
        "the sources now hold 5 inputs, 4 were packed or rejected",
    ),
    "one less": (
        lambda source: [(source / name).unlink() for name in ("001.jpg", "001.txt")],
        "the sources now hold 3 inputs, 4 were packed or rejected",
    ),
}


@pytest.mark.parametrize("change", SINCE)
def test_resume_of_a_finished_pack_says_what_of_the_sources_has_changed(tmp_path, capsys, change):
    source, out = folder_of(tmp_path / "imgs", 3), tmp_path / "imgs" / "o.rec"
    write(source, {"lost.txt": "without an image"})
    config = PackConfig(sources=(str(source),), out=str(out), workers=1, proof="none")
    first = pack(config)
    assert first.count + first.rejects == 4
    before = files_of(out)
    capsys.readouterr()
    act, told = SINCE[change]
    act(source)
    assert pack(dataclasses.replace(config, resume=True)).count == first.count
    said = [f"{out} is complete already"]
    if told:
        words = told.format(source=tmp_path / "imgs")
        said.append(f"warning: {words}; --overwrite in place of --resume packs it anew")
    assert capsys.readouterr().err.splitlines() == said
    assert files_of(out) == before


@pytest.mark.parametrize("kind", ["table", "tar", "parquet", "tokens"])
def test_resume_of_a_finished_pack_looks_at_files_of_every_kind(tmp_path, capsys, kind):
    imgs = folder_of(tmp_path / "imgs", 2)
    options: dict[str, object] = {}
    if kind == "table":
        path = write(tmp_path, {"rows.csv": "image,caption\nimgs/000.jpg,a\n"}) / "rows.csv"
    elif kind == "tar":
        path = write_tar(tmp_path / "t.tar", [("0.jpg", (imgs / "000.jpg").read_bytes()), ("0.txt", b"a")])
    elif kind == "parquet":
        path = tmp_path / "cells.parquet"
        pq.write_table(pa.table({"image": [(imgs / "000.jpg").read_bytes()], "caption": ["a"]}), path)
    else:
        path = tmp_path / "ids.npy"
        np.save(path, np.full((2, 77), 5, np.int32))
        options = {"tokens": str(path)}
    source = imgs if kind == "tokens" else path
    config = PackConfig(sources=(str(source),), out=str(tmp_path / "o.rec"), workers=1, proof="none", **options)
    pack(config)

    def warned() -> list[str]:
        capsys.readouterr()
        pack(dataclasses.replace(config, resume=True))
        return capsys.readouterr().err.splitlines()[1:]

    assert warned() == []
    replace_by_an_older_one(path)
    said = f"warning: {path} was replaced since, or its name or permissions were changed; --overwrite in place of"
    assert warned() == [f"{said} --resume packs it anew"]
    later(path)
    assert warned() == [f"warning: {path} has changed since; --overwrite in place of --resume packs it anew"]


def test_an_overwriting_pack_goes_on_as_well(tmp_path):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    out.write_text("old")
    with halted(20, source, out, "--overwrite") as pack_:
        pack_.end(signal.SIGKILL)
    assert out.read_text() == "old"
    with pytest.raises(UsageError, match="exists already"):
        resumed(source, out)
    assert resumed(source, out, overwrite=True) == undisturbed(source)


def grow(source: Path) -> None:
    (source / "000a.jpg").write_bytes(photo())


def shrink(source: Path) -> None:
    (source / "003.jpg").unlink()


OTHER_OPTIONS = [
    ({"quality": 90}, "was begun with --quality 95, this command has 90"),
    ({"caption_key": ("a", "b")}, "was begun with --caption-key none, this command has a b"),
    ({"shard_size": 8}, "was begun with --shard-size none, this command has 8"),
    ({"shuffle": True}, "was begun without --shuffle, this command has it"),
    ({"sources": ("elsewhere",)}, "elsewhere: no such folder or file"),
]


def test_other_options_or_sources_are_named_and_nothing_is_lost(tmp_path):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    with halted(20, source, out) as pack_:
        pack_.end(signal.SIGKILL)
    whole = undisturbed(source)

    def check_refused(message: str, **options: object) -> None:
        kept = {path: path.read_bytes() for path in (tmp_path / ".o.rec.partial").iterdir()}
        with pytest.raises(UsageError, match=message) as fault:
            resumed(source, out, **options)
        assert "are kept" not in fault.value.message
        assert fault.value.hint == "--overwrite in place of --resume starts anew" or "sources" in options
        assert {path: path.read_bytes() for path in (tmp_path / ".o.rec.partial").iterdir()} == kept

    for options, message in OTHER_OPTIONS:
        check_refused(message, **options)
    (source / "000a.jpg").write_bytes(photo())
    check_refused(r"imgs: its first \d+ inputs are not those that were packed")
    (source / "000a.jpg").unlink()
    (source / "003.jpg").rename(tmp_path / "003.jpg")
    check_refused(r"imgs: its first \d+ inputs are not those that were packed")
    (tmp_path / "003.jpg").rename(source / "003.jpg")
    assert resumed(source, out) == whole


@pytest.mark.parametrize("spoil", ["o.rec", SLOW("o.idx"), SLOW("o.sources.tsv")])
def test_partial_files_that_are_not_what_the_journal_says_are_not_continued(tmp_path, spoil):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    with halted(20, source, out) as pack_:
        pack_.end(signal.SIGKILL)
    path = tmp_path / ".o.rec.partial" / spoil
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot be continued: it is"):
        resumed(source, out)
    assert shown(tmp_path) == ["imgs"]
    assert resumed(source, out, resume=False, overwrite=True) == undisturbed(source)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"captions": 2}, "captions 3, this command 2"),
        ({"quality": 50}, "quality 95, this command 50"),
        ({"caption_key": ("alt",)}, "caption_key none, this command alt"),
        ({"shuffle": True}, "shuffled False, this command True"),
        ({"sources": ("other",)}, r"sources .*imgs, this command other"),
    ],
    ids=str,
)
def test_a_finished_set_of_other_settings_is_not_this_pack(tmp_path, options, said):
    source, out = folder_of(tmp_path / "imgs", 3), tmp_path / "o.rec"
    config = PackConfig(sources=(str(source),), out=str(out), proof="none", workers=1)
    pack(config)
    kept = files_of(out)
    with pytest.raises(UsageError, match=f"complete already; it has {said}") as error:
        pack(dataclasses.replace(config, resume=True, **options))
    assert error.value.hint == "--overwrite packs it anew"
    assert files_of(out) == kept


@pytest.mark.parametrize("journal", ["", "{", "[]", '{"phase": "reading"}'])
def test_a_damaged_journal_is_not_continued_and_not_thrown_away_unasked(tmp_path, journal):
    source, out = folder_of(tmp_path / "imgs", 3), tmp_path / "o.rec"
    (tmp_path / ".o.rec.partial").mkdir()
    (tmp_path / ".o.rec.partial" / "journal.json").write_text(journal)
    config = PackConfig(sources=(str(source),), out=str(out), proof="none", workers=1)
    with pytest.raises(UsageError, match=r"journal\.json: cannot be continued: it is damaged, or of another release"):
        pack(dataclasses.replace(config, resume=True))
    with pytest.raises(UsageError, match="an unfinished pack with a damaged journal, or one of another release, last"):
        pack(config)
    assert (tmp_path / ".o.rec.partial" / "journal.json").read_text() == journal
    pack(dataclasses.replace(config, overwrite=True))
    assert files_of(out) == undisturbed(source)


@pytest.mark.parametrize("with_result", [False, True], ids=["the log", "log and result"])
def test_a_pack_whose_log_nobody_reads_any_more_comes_to_its_end(tmp_path, with_result):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    (source / "000a.jpg").write_bytes(photo())
    command = [sys.executable, "-m", "rwkvclip_cli", "pack", str(source), str(out), "--proof", "none", "--seed", "3"]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(command, stdout=writes if with_result else subprocess.PIPE, stderr=writes, check=False)
    os.close(writes)
    # Its result could not be said; all that it wrote is there.
    assert done.returncode == (128 + signal.SIGPIPE if with_result else 0)
    assert with_result or done.stdout.startswith(b"%s: 30 records, " % os.fsencode(out))
    assert files_of(out) == undisturbed(source)
    assert not (tmp_path / ".o.rec.partial").exists()


def test_a_second_pack_is_refused_whatever_its_options(tmp_path):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    with halted(10, source, out) as first:
        first.end(signal.SIGKILL)
    with halted(10, source, out, "--resume") as first:
        config = PackConfig(sources=(str(source),), out=str(out), proof="none")
        for options in ({}, {"resume": True}, {"shard_size": 5}, {"overwrite": True}):
            with pytest.raises(RwkvClipError, match=r"o\.rec: another pack is writing it"):
                pack(dataclasses.replace(config, **options))  # type: ignore[arg-type]
        assert first.go_on()[0] == 0
    assert files_of(out) == undisturbed(source)


@pytest.mark.parametrize("with_nursery", [False, True], ids=["", "with the nursery"])
@pytest.mark.parametrize("workers", [SLOW(1), 2])
def test_workers_that_are_killed_are_replaced(tmp_path, workers, with_nursery):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    with halted(12, source, out, workers=workers) as pack_:
        _, nursery, *children = family(pack_.process.pid)
        assert len(children) == workers
        for pid in (*children, nursery) if with_nursery else children:
            os.kill(pid, signal.SIGKILL)
        code, _, log = pack_.go_on()
    assert (code, "Traceback" in log) == (0, False)
    assert files_of(out) == undisturbed(source)


def full_disk_run(arguments: list[str | Path], limit: int | None) -> "subprocess.CompletedProcess[str]":
    """A pack with a checkpoint behind every input, whose writes beyond so many bytes a file fail."""

    def bound_files() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-c", HALTING, "-1", "pack", *map(str, arguments), "--proof", "none", "--workers", "1"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=bound_files,
        timeout=60,
    )


@pytest.mark.parametrize(
    "options",
    [[], SLOW(["--shuffle"]), SLOW(["--shard-size", "20"])],
    ids=" ".join,
)
def test_a_pack_that_fills_the_disk_goes_on_when_there_is_room(tmp_path, options):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    done = full_disk_run([source, out, *options], 25_000)
    assert done.returncode == 1
    message, hint = done.stderr.splitlines()[-2:]
    assert "cannot write" in message
    assert "File too large; " in message
    assert message.endswith(" records are kept")
    assert hint.startswith("  try: ulimit -f unlimited; then ")
    assert hint.endswith("--resume")
    assert "Traceback" not in done.stderr
    assert shown(tmp_path) == ["imgs"]
    again = full_disk_run([source, out, *options, "--resume"], 25_000)
    assert (again.returncode, "are kept" in again.stderr) == (1, True)
    freed = full_disk_run([source, out, *options, "--resume"], None)
    assert freed.returncode == 0, freed.stderr
    whole = tmp_path / "whole"
    whole.mkdir()
    assert run_cli("pack", source, whole / "o.rec", "--proof", "none", *options).returncode == 0
    assert sorted(path.name for path in whole.iterdir()) == sorted(path.name for path in tmp_path.glob("o*"))
    for path in whole.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


@pytest.mark.cluster
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize(("options", "size"), [([], "56k"), (["--shuffle"], "100k")], ids=["plain", "shuffle"])
def test_a_full_disk_is_one_clear_error_and_goes_on_once_it_is_larger(tmp_path, options, size):
    source, disk = folder_of(tmp_path / "imgs", COUNT), tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], check=True)
    try:
        done = full_disk_run([source, disk / "o.rec", *options], None)
        assert done.returncode == 1, done.stderr
        assert "No space left on device; " in done.stderr
        assert "Traceback" not in done.stderr
        assert shown(disk) == []
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        freed = full_disk_run([source, disk / "o.rec", *options, "--resume"], None)
        assert freed.returncode == 0, freed.stderr
        assert "continuing" in freed.stderr
        assert files_of(disk / "o.rec") == undisturbed(source, shuffle=bool(options))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_files_that_change_or_vanish_behind_the_listing_are_rejects(tmp_path):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    with halted(12, source, out) as pack_:
        (source / "020.jpg").unlink()
        (source / "021.jpg").unlink()
        (source / "021.jpg").mkdir()
        (source / "022.jpg").write_bytes(b"")
        (source / "023.jpg").write_bytes(b"no longer a picture")
        (source / "024.txt").unlink()
        (source / "025.txt").write_text(" ")
        (source / "026.jpg").unlink()
        (source / "026.jpg").symlink_to(EIO)
        code, _, log = pack_.go_on()
    assert (code, "Traceback" in log) == (0, False)
    reasons = rejects(out)
    assert reasons.keys() == {"020.jpg", "021.jpg", "022.jpg", "023.jpg", "024.jpg", "025.jpg", "026.jpg"}
    assert (reasons["020.jpg"], reasons["022.jpg"]) == ("missing-image", "empty-file")
    assert (reasons["023.jpg"], reasons["025.jpg"]) == ("unreadable-image", "missing-caption")
    assert json.loads(out.with_suffix(".manifest.json").read_text())["count"] == COUNT - 7


def test_a_folder_that_vanishes_is_rejects_alone(tmp_path):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    folder_of(source / "zz", 3)
    with halted(12, source, out) as pack_:
        shutil.rmtree(source / "zz")
        code, _, log = pack_.go_on()
    assert (code, "Traceback" in log) == (0, False)
    assert rejects(out) == {} or rejects(out) == {"zz": "unreadable-folder"}


def table_of(root: Path) -> Path:
    folder_of(root / "imgs", COUNT)
    rows = "".join(f"imgs/{number:03}.jpg,row {number}\n" for number in range(COUNT))
    (root / "rows.csv").write_text(f"image,caption\n{rows}")
    return root / "rows.csv"


def tar_of(root: Path) -> Path:
    members = [(f"{n:03}.{end}", photo(n) if end == "jpg" else b"x") for n in range(COUNT) for end in ("jpg", "txt")]
    return write_tar(root / "rows.tar", members)


@pytest.mark.parametrize("make", [table_of, SLOW(tar_of)])
@pytest.mark.parametrize("change", ["grow", "replace", "vanish"])
def test_a_table_or_tar_that_changes_ends_the_pack_until_it_is_as_it_was(tmp_path, make, change):
    source, out = make(tmp_path), tmp_path / "o.rec"
    whole = undisturbed(source)
    saved = source.with_name("saved")
    shutil.copy2(source, saved)
    with halted(12, source, out) as pack_:
        if change == "grow":
            source.write_bytes(source.read_bytes() + b"imgs/000.jpg,again\n")
        else:
            source.unlink()
        if change == "replace":
            shutil.copy(saved, source)
        code, result, log = pack_.go_on()
    assert (code, result) == (1, "")
    what = "has vanished" if change == "vanish" else "has changed"
    assert f"rwkvclip: {source} {what} since this pack began" in log
    assert "records are kept" in log
    assert "Traceback" not in log
    assert not list(tmp_path.glob("o.*"))
    if change == "grow":
        with pytest.raises(UsageError, match=f"{source} has changed since the unfinished pack began"):
            resumed(source, out)
    source.unlink(missing_ok=True)
    saved.rename(source)
    assert resumed(source, out) == whole


def test_a_tar_that_vanishes_before_its_turn_is_named(tmp_path):
    folder = tmp_path / "tars"
    folder.mkdir()
    for name in ("a", "b"):
        tar_of(folder).rename(folder / f"{name}.tar")
    options = {"format": "webdataset"}
    whole = undisturbed(folder, **options)
    with halted(12, folder, tmp_path / "o.rec", "--format", "webdataset") as pack_:
        (folder / "b.tar").rename(tmp_path / "b.tar")
        code, _, log = pack_.go_on()
    assert (code, f"{folder / 'b.tar'} has vanished since this pack began" in log) == (1, True)
    with pytest.raises(UsageError, match=r"b\.tar is gone since the unfinished pack began"):
        resumed(folder, tmp_path / "o.rec", **options)
    (tmp_path / "b.tar").rename(folder / "b.tar")
    assert resumed(folder, tmp_path / "o.rec", **options) == whole


def test_a_table_that_cannot_be_read_is_one_clear_error(tmp_path):
    (tmp_path / "rows.csv").symlink_to(EIO)
    done = run_cli("pack", tmp_path / "rows.csv", tmp_path / "o.rec")
    assert (done.returncode, done.stderr) == (2, f"rwkvclip: {tmp_path}/rows.csv: Input/output error\n")


# A read of the file that $FAIL names, behind its first $FAIL_AT bytes, fails.
FAILING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
ssize_t read(int descriptor, void *buffer, size_t count) {
    static ssize_t (*real)(int, void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "read");
    const char *wanted = getenv("FAIL");
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = wanted ? readlink(link, path, sizeof path - 1) : -1;
    if (length > 0) {
        path[length] = 0;
        if (!strcmp(path, wanted) && lseek(descriptor, 0, SEEK_CUR) >= atol(getenv("FAIL_AT"))) {
            errno = EIO;
            return -1;
        }
    }
    return real(descriptor, buffer, count);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler makes the disk fail")
def test_a_disk_that_fails_under_a_table_is_one_clear_error_and_the_pack_goes_on(tmp_path):
    source, out = table_of(tmp_path), tmp_path / "o.rec"
    with source.open("a") as file:
        file.writelines(f"imgs/{number % COUNT:03}.jpg,{'much to say ' * 400}\n" for number in range(30))
    whole = undisturbed(source)
    (tmp_path / "fail.c").write_text(FAILING)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "fail.so", tmp_path / "fail.c", "-ldl"], check=True)
    at = len(source.read_bytes()) - 50_000
    failing = {"LD_PRELOAD": str(tmp_path / "fail.so"), "FAIL": str(source), "FAIL_AT": str(at)}
    command = [sys.executable, "-c", HALTING, "-1", "pack", str(source), str(out), "--proof", "none", "--workers", "1"]
    # Neither the progress bar's count nor the columns are to meet the fault first.
    done = subprocess.run(command, env=os.environ | failing, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done.stderr
    message = done.stderr.splitlines()[-2]
    assert message.startswith(f"rwkvclip: cannot read {source}: Input/output error; ")
    assert message.endswith("records are kept")
    assert resumed(source, out) == whole


def flipped(data: bytes) -> bytes:
    """One bit in every thousand bytes turned over: in every record, and in none of their heads."""
    place = min(500, len(data) // 2)
    return bytes(byte ^ (at % 997 == place) for at, byte in enumerate(data))


DAMAGE = {
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"more\n"),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def kept_files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.parent.iterdir() if path.name.startswith("o")}


def refusal(config: PackConfig) -> UsageError | None:
    try:
        pack(config)
    except UsageError as error:
        return error
    return None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "dedupe": True, "shard_size": 7},
        {"shard_size": 7},
        SLOW({"dedupe": True}),
        SLOW({"shuffle": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("phase", ["reading", "shuffling", "written"])
def test_no_damage_to_what_is_continued_comes_under_the_final_names(tmp_path, monkeypatch, phase, options):
    """Whichever of the partial files it is: --resume gives the undisturbed bytes, or refuses and says how to go on."""
    if phase == "shuffling" and "shuffle" not in options:
        pytest.skip("nothing is shuffled")
    source = folder_of(tmp_path / "imgs", COUNT)
    monkeypatch.setattr(packing, "CHECKPOINT_EVERY_S", 0)
    monkeypatch.setattr(packing, "CHECKPOINT_SHARE", 0)
    config = PackConfig(sources=(str(source),), out="to be named", workers=1, proof="none", resume=True)
    config = dataclasses.replace(config, **options)

    class StopError(Exception):
        pass

    def stop_in_phase(output: OutputSet, journal: Journal) -> None:
        keep(output, journal)
        if journal.phase == phase and (phase == "written" or sum(shard.count for shard in journal.shards) >= 12):
            raise StopError

    keep = OutputSet.keep
    (tmp_path / "whole").mkdir()
    pack(dataclasses.replace(config, out=str(tmp_path / "whole" / "o.rec")))
    whole = kept_files(tmp_path / "whole" / "o.rec")
    begun = tmp_path / "begun"
    begun.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(OutputSet, "keep", stop_in_phase)
        with pytest.raises(StopError):
            pack(dataclasses.replace(config, out=str(begun / "o.rec")))
    partial = begun / ".o.rec.partial"
    damaged = sorted(path.relative_to(begun) for path in partial.rglob("*") if path.is_file())
    refused = 0
    for number, (path, (damage, do)) in enumerate(itertools.product(damaged, DAMAGE.items())):
        out = tmp_path / str(number) / "o.rec"
        shutil.copytree(begun, out.parent)
        do(out.parent / path)
        descriptors = open_descriptors()
        error = refusal(dataclasses.replace(config, out=str(out)))
        # The error is still there, and with it all that nobody closed.
        assert open_descriptors() == descriptors, (path, damage)
        refused += error is not None
        assert error is None or ("cannot be continued" in error.message and "in place of --resume" in error.hint), path
        assert kept_files(out) == ({} if error else whole), (path, damage)
        shutil.rmtree(out.parent)
    assert refused >= 4 * 3


def test_what_others_made_while_a_pack_ran_is_not_replaced(tmp_path):
    source, out = folder_of(tmp_path / "imgs", COUNT), tmp_path / "o.rec"
    with halted(20, source, out) as pack_:
        out.write_bytes(b"mine")
        exit_code, result, log = pack_.go_on()
    assert (exit_code, result) == (1, "")
    assert f"{out} exists already; it was made while this pack ran; 30 records are kept" in log
    assert "try: move it away; then rwkvclip pack " in log
    assert out.read_bytes() == b"mine"
    assert shown(tmp_path) == ["imgs", "o.rec"]
    out.unlink()
    assert resumed(source, out) == undisturbed(source)


@pytest.mark.parametrize(("name", "options"), [("o.idx", {}), ("o-00000.rec", {"shard_size": 7})], ids=str)
def test_a_folder_of_the_name_of_an_output_is_never_removed(tmp_path, name, options):
    source = folder_of(tmp_path / "imgs", 3)
    (tmp_path / name / "mine").mkdir(parents=True)
    config = PackConfig(sources=(str(source),), out=str(tmp_path / "o.rec"), proof="none", overwrite=True)
    with pytest.raises(UsageError, match=f"{name}: is a folder"):
        pack(dataclasses.replace(config, **options))
    assert (tmp_path / name / "mine").is_dir()
