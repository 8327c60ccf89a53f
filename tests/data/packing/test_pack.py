"""Packing from sources to files: every input is a record or a reject, whatever happens on the way."""

import contextlib
import json
import os
import subprocess
import sys
import zlib
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, types
from pack_files import files_of, folder_of, photo
from PIL import Image

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.console import RwkvClipError, UnableError, UsageError
from rwkvclip_cli.data.captions import Tokenizer
from rwkvclip_cli.data.packing import pool
from rwkvclip_cli.data.packing.images import read_rgb
from rwkvclip_cli.data.packing.output import SUFFIXES
from rwkvclip_cli.data.packing.pack import PackSummary, pack
from rwkvclip_cli.data.packing.samples import REASONS, Reject, Sample
from rwkvclip_cli.data.packing.worker import Packed, WorkerOptions, pack_samples
from rwkvclip_cli.data.recordio import RecordReader

HERE = Path(__file__).parent
# A few of each fate, none of them large.
WEIRD = [
    "BlueSquare_truncated.jpg",
    "cat_claims_65500x65500.jpg",
    "cat_exif6.jpg",
    "cat_exif6.png",
    "cat_two_jpegs.jpg",
    "empty.heic",
    "gif_named.png",
    "hopper_16bit.pgm",
    "html_error_page.jpg",
    "invalid-zlib.png",
    "jpeg_no_extension",
    "paletted-transparent.png",
    "pil_sample_cmyk.jpg",
    "truncated_app14.jpg",
    "upper_case_double.JPG.JPEG",
]
HOSTILE = [b"new\nline.jpg", b"tab\tand space.JPG", b"caf\xe9.jpg", b"back\\slash.jpg", "日本語 😀.jpg".encode()]


def rejects_of(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in out.with_suffix(".rejects.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a source of each kind: awkward files, hostile names, a table, a tar."""
    root = tmp_path_factory.mktemp("inputs")
    images = root / "imgs"
    images.mkdir()
    for name in WEIRD:
        (images / name).write_bytes((HERE / "weird_images" / name).read_bytes())
        stem = name.rpartition(".")[0] or name
        (images / f"{stem}.txt").write_text(f"an awkward picture\n{name}\n")
    for number, name in enumerate(HOSTILE):
        path = os.fsencode(images) + b"/" + name
        Path(os.fsdecode(path)).write_bytes(photo(number))
        Path(os.fsdecode(path[:-3] + b"txt")).write_text("hostile")
    (images / "lonely.jpg").write_bytes(photo(90))
    (images / "orphan.txt").write_text("no image")
    (images / "blank.jpg").write_bytes(photo(91))
    (images / "blank.txt").write_bytes(b" \n\0\n")
    (images / "long.jpg").write_bytes(photo(92))
    (images / "long.json").write_text(json.dumps({"captions": ["word " * 100, "b", "c", "d", "e"]}))
    rows = ["image,caption", "imgs/cat_two_jpegs.jpg,NA", "imgs/none.jpg,gone", "imgs/cat_exif6.png,None"]
    (root / "pairs.csv").write_text("\n".join(rows))
    (root / "demo.tar").write_bytes((HERE.parent / "demo.tar").read_bytes())
    return root


SOURCES = ("imgs", "pairs.csv", "demo.tar")


@pytest.fixture(scope="module")
def packed(inputs: Path) -> tuple[Path, PackSummary]:
    """The working folder packed once into all.rec, relative to it."""
    with contextlib.chdir(inputs):
        summary = pack(PackConfig(sources=SOURCES, out="all.rec", workers=2))
    return inputs / "all.rec", summary


def test_every_input_is_a_record_or_a_reject(packed):
    out, summary = packed
    images = len(WEIRD) + len(HOSTILE) + 4  # lonely, orphan, blank, long
    assert summary.count + summary.rejects == images + 3 + 59
    rejects = rejects_of(out)
    assert Counter(reject["reason"] for reject in rejects) == summary.reasons
    assert [(reject["source"], reject["reason"]) for reject in rejects] == [
        ("imgs/BlueSquare_truncated.jpg", "truncated-image"),
        ("imgs/blank.jpg", "missing-caption"),
        ("imgs/cat_claims_65500x65500.jpg", "too-many-pixels"),
        ("imgs/empty.heic", "empty-file"),
        ("imgs/html_error_page.jpg", "unreadable-image"),
        ("imgs/invalid-zlib.png", "unreadable-image"),
        ("imgs/lonely.jpg", "missing-caption"),
        ("imgs/orphan.txt", "missing-image"),
        ("pairs.csv:3:imgs/none.jpg", "missing-image"),
    ]
    for reject in rejects:
        assert list(reject) == ["source", "reason", "message"]
        assert reject["reason"] in REASONS
        assert reject["source"].split(":")[-1] in reject["message"]
    assert summary.ignored == 1  # CREDITS.tsv in the tar


def test_the_records_hold_header_tokens_and_jpeg(packed):
    out, summary = packed
    sources = [line.split("\t") for line in out.with_suffix(".sources.tsv").read_text().splitlines()]
    tokenizer = Tokenizer()
    with RecordReader(out) as reader:
        assert len(reader) == summary.count == len(sources)
        for ordinal, (number, source, kept, checksum) in enumerate(sources):
            record = reader.record(ordinal)
            assert (int(number), record.id, record.id2, record.label) == (ordinal, ordinal, 0, 0.0)
            assert len(record.labels) == 231
            assert record.image.startswith(b"\xff\xd8\xff")
            assert checksum == f"{zlib.crc32(bytes(record.labels) + record.image):08x}"
            path = out.parent / source
            if kept == "kept" and path.is_file():
                assert record.image == path.read_bytes()
        by_source = {source: ordinal for ordinal, (_, source, _, _) in enumerate(sources)}
        cat = reader.record(by_source["imgs/cat_two_jpegs.jpg"])
        captions = ["an awkward picture", "cat_two_jpegs.jpg"]
        assert cat.labels == tokenizer.fill_slots(captions, 3)[0]
        long = reader.record(by_source["imgs/long.json".replace("json", "jpg")])
        assert long.labels == tokenizer.fill_slots(["word " * 100, "b", "c"], 3)[0]
        word = reader.record(by_source["pairs.csv:2:imgs/cat_two_jpegs.jpg"])
        assert word.labels == tokenizer.fill_slots(["NA"], 3)[0]
        duck = reader.record(by_source["demo.tar:00_duck.jpg"])
        assert tokenizer.decode(duck.labels[:77]) == "rubber duck"


def test_sources_say_how_each_was_kept_on_one_line_each(packed):
    out, _ = packed
    lines = out.with_suffix(".sources.tsv").read_text().split("\n")[:-1]
    kept = {source: how for _, source, how, _ in (line.split("\t") for line in lines)}
    assert {source: how for source, how in kept.items() if source.startswith("imgs/")} == {
        "imgs/back\\\\slash.jpg": "kept",
        "imgs/caf\\xe9.jpg": "kept",
        "imgs/cat_exif6.jpg": "kept",
        "imgs/cat_exif6.png": "re-encoded:png",
        "imgs/cat_two_jpegs.jpg": "kept",
        "imgs/gif_named.png": "re-encoded:gif",
        "imgs/hopper_16bit.pgm": "re-encoded:ppm",
        "imgs/jpeg_no_extension": "kept",
        "imgs/long.jpg": "kept",
        "imgs/new\\nline.jpg": "kept",
        "imgs/paletted-transparent.png": "re-encoded:png",
        "imgs/pil_sample_cmyk.jpg": "re-encoded:other-pixels-in-dali",
        "imgs/tab\\tand space.JPG": "kept",
        "imgs/truncated_app14.jpg": "re-encoded:refused-by-dali",
        "imgs/upper_case_double.JPG.JPEG": "kept",
        "imgs/日本語 😀.jpg": "kept",
    }


def test_the_manifest_tells_what_was_packed(packed):
    out, summary = packed
    import hashlib

    manifest = json.loads(out.with_suffix(".manifest.json").read_text())
    tokenizer = Tokenizer()
    assert manifest["tokenizer"] == {"name": tokenizer.name, "sha256": tokenizer.hash}
    assert manifest["content_hash"] == hashlib.sha256(out.read_bytes()).hexdigest() == summary.content_hash
    assert manifest["size_bytes"] == out.stat().st_size == summary.size_bytes
    assert {key: manifest[key] for key in ("format_version", "count", "captions", "context_length", "shuffled")} == {
        "format_version": 1,
        "count": summary.count,
        "captions": 3,
        "context_length": 77,
        "shuffled": False,
    }
    assert manifest["sources"] == list(SOURCES)
    assert manifest["rejects"] == summary.rejects == 9
    statistics = manifest["statistics"]
    assert sum(statistics["kept"].values()) == summary.count
    assert statistics["captions_truncated"] == 1
    assert statistics["captions_dropped"] == 2
    assert statistics["caption_tokens"]["max"] == 77
    assert statistics["caption_tokens"]["min"] == 3
    assert statistics["captions_a_record"] == {"min": 1, "max": 5, "mean": statistics["captions_a_record"]["mean"]}
    assert "workers" not in manifest["options"]


@pytest.mark.parametrize("workers", [1, 5])
def test_the_bytes_do_not_depend_on_the_workers(packed, workers, tmp_path, monkeypatch):
    out, _ = packed
    monkeypatch.chdir(out.parent)
    monkeypatch.setattr(pool, "BATCH_SAMPLES", 7)
    again = tmp_path / "again.rec"
    pack(PackConfig(sources=SOURCES, out=str(again), workers=workers))
    assert files_of(again) == files_of(out)


def test_dali_reads_what_was_packed(packed):
    out, summary = packed
    pipeline = Pipeline(batch_size=8, num_threads=1, device_id=None)
    with pipeline:
        jpegs, labels = fn.readers.mxnet(path=[str(out)], index_path=[str(out.with_suffix(".idx"))], name="reader")
        pipeline.set_outputs(fn.decoders.image(jpegs, device="cpu", output_type=types.RGB), labels)
    pipeline.build()
    assert pipeline.reader_meta("reader")["epoch_size"] == summary.count
    with RecordReader(out) as reader:
        for start in range(0, summary.count, 8):
            images, labels = pipeline.run()
            for index in range(min(8, summary.count - start)):
                record = reader.record(start + index)
                assert np.array_equal(labels.at(index), record.labels)
                assert np.array_equal(images.at(index), read_rgb(record.image))


def test_the_command_prints_its_summary_and_json(tmp_path):
    source = folder_of(tmp_path / "imgs", 2)
    command = [sys.executable, "-m", "rwkvclip_cli", "pack", str(source), str(tmp_path / "out.rec"), "--workers", "1"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{tmp_path}/out.rec: 2 records" in plain.stdout
    assert "packing: 2 of 2 images" in plain.stderr
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (second.returncode, "exists already" in second.stderr) == (2, True)
    again = subprocess.run([*command, "--overwrite", "--json"], capture_output=True, text=True, check=True)
    document = json.loads(again.stdout)
    assert (document["count"], document["rejects"], document["kept"]) == (2, 0, {"kept": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["imgs", *(f"out{suffix}" for suffix in SUFFIXES.values())]
    )


def test_pack_works_in_a_script_without_a_main_guard(tmp_path):
    source = folder_of(tmp_path / "imgs", 2)
    script = tmp_path / "script.py"
    script.write_text(
        "from rwkvclip_cli.config import PackConfig\nfrom rwkvclip_cli.data.packing.pack import pack\n"
        f"print(pack(PackConfig(sources=({str(source)!r},), out={str(tmp_path / 'out.rec')!r}, workers=1)).count)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


def test_an_output_inside_its_source_is_no_input(tmp_path):
    source = folder_of(tmp_path / "imgs", 2)
    config = PackConfig(sources=(str(source),), out=str(source / "out.rec"), workers=1, proof="none")
    assert pack(config).rejects == 0
    first = files_of(source / "out.rec")
    assert pack(PackConfig(**{**vars(config), "overwrite": True})).rejects == 0
    assert files_of(source / "out.rec") == first


def test_slots_context_quality_and_size_follow_the_options(tmp_path):
    source = folder_of(tmp_path / "imgs", 2)
    Image.new("RGB", (64, 20), (10, 200, 30)).save(source / "wide.png")
    (source / "wide.txt").write_text("first\nsecond one is longer")
    config = PackConfig(
        sources=(str(source),), out=str(tmp_path / "o.rec"), workers=1, captions=2, context_length=5, max_side=32
    )
    summary = pack(config)
    assert summary.kept == {"resized": 3}
    assert summary.statistics["captions_truncated"] == 1
    with RecordReader(tmp_path / "o.rec") as reader:
        record = reader.record(2)
        assert record.labels == Tokenizer().fill_slots(["first", "second one is longer"], 2, 5)[0]
        assert read_rgb(record.image).shape == (10, 32, 3)


@pytest.mark.parametrize(
    ("sources", "out", "message"),
    [
        ((), "o.rec", "no source"),
        (("imgs",), "o.tar", r"has to end in \.rec"),
        (("imgs",), ".rec", r"has to end in \.rec"),
        (("imgs",), "none/o.rec", "no folder none"),
        (("imgs",), "old.rec", r"old\.rec exists already"),
        (("imgs",), "index.rec", r"index\.idx exists already"),
        (("imgs",), "folder.rec", "is a folder"),
        (("nonesuch",), "o.rec", "no such folder or file"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(tmp_path, monkeypatch, sources, out, message):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "imgs", 1)
    (tmp_path / "old.rec").write_text("old")
    (tmp_path / "index.idx").write_text("old")
    (tmp_path / "folder.rec").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=message):
        pack(PackConfig(sources=sources, out=out))
    assert sorted(tmp_path.rglob("*")) == before


def test_where_nothing_can_be_packed_the_error_says_why_and_nothing_stays(tmp_path):
    source = tmp_path / "imgs"
    source.mkdir()
    (source / "a.jpg").write_bytes(b"<html>")
    (source / "a.txt").write_text("a")
    (source / "b.txt").write_text("b")
    with pytest.raises(RwkvClipError, match=r"2 inputs of .*, every one rejected") as fault:
        pack(PackConfig(sources=(str(source),), out=str(tmp_path / "o.rec"), workers=1))
    assert fault.value.exit_code == 1
    assert "HTML" in "".join(fault.value.details)
    assert "missing-image 1" in fault.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["imgs"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RwkvClipError, match="no image in"):
        pack(PackConfig(sources=(str(tmp_path / "empty"),), out=str(tmp_path / "o.rec")))


def test_a_picture_that_no_record_holds_is_a_reject(monkeypatch):
    monkeypatch.setattr("rwkvclip_cli.data.packing.worker.MAX_PAYLOAD_BYTES", 24 + 4 * 231 + len(photo()))
    assert isinstance(pack_samples([Sample("a", photo(), ("x",))], WorkerOptions())[0], Packed)
    monkeypatch.setattr("rwkvclip_cli.data.packing.worker.MAX_PAYLOAD_BYTES", 24 + 4 * 231 + len(photo()) - 1)
    (reject,) = pack_samples([Sample("a", photo(), ("x",))], WorkerOptions())
    assert isinstance(reject, Reject)
    assert reject.reason == "too-large"


def test_a_sidecar_that_cannot_be_parsed_is_a_reject(tmp_path):
    (tmp_path / "a.jpg").write_bytes(photo())
    (tmp_path / "a.json").write_text("{broken")
    with pytest.raises(RwkvClipError, match=r"unreadable-caption 1.*\n.*a\.jpg: .*a\.json is not valid JSON"):
        pack(PackConfig(sources=(str(tmp_path),), out=str(tmp_path / "o.rec"), workers=1))


def test_without_dali_the_decode_proof_is_refused_with_a_way_out(tmp_path, monkeypatch):
    source = folder_of(tmp_path / "imgs", 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnableError, match="nvidia-dali") as fault:
        pack(PackConfig(sources=(str(source),), out=str(tmp_path / "o.rec")))
    assert fault.value.hint == "--proof structure"


def test_without_mxnet_its_writer_is_refused_with_a_way_out(tmp_path, monkeypatch):
    source = folder_of(tmp_path / "imgs", 1)
    monkeypatch.setitem(sys.modules, "mxnet", None)
    with pytest.raises(UnableError, match="mxnet cannot be imported") as fault:
        pack(PackConfig(sources=(str(source),), out=str(tmp_path / "o.rec"), writer="mxnet"))
    assert "--writer native" in fault.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["imgs"]


# Labels and images, one record a line: numbers, a tab, the image in hexadecimal.
WRITE = """
import sys
from array import array
from pathlib import Path
root, kind, records, rec, idx = sys.argv[1:]
sys.path.insert(0, root)
from rwkvclip_cli.data.packing.writers import open_writer
with open_writer(kind, Path(rec), Path(idx)) as writer:
    for number, line in enumerate(Path(records).read_text().splitlines()):
        labels, image = line.split("\\t")
        writer.write(array("f", map(float, labels.split())), bytes.fromhex(image), number)
"""


def test_the_real_mxnet_writes_the_same_bytes(run_mxnet, tmp_path):
    magic = bytes.fromhex("0a23d7ce")
    images = [photo(), b"odd", b"", magic * 2 + b"x" + magic]
    labels = Tokenizer().fill_slots(["a cat"], 3)[0]
    lines = [" ".join(map(str, map(int, labels))) + "\t" + image.hex() for image in images]
    (tmp_path / "records").write_text("\n".join(lines))
    root = Path(pool.__file__).parents[3]
    for kind in ("native", "mxnet"):
        files = [tmp_path / f"{kind}.{suffix}" for suffix in ("rec", "idx")]
        run_mxnet(WRITE, root, kind, tmp_path / "records", *files)
    assert (tmp_path / "mxnet.rec").read_bytes() == (tmp_path / "native.rec").read_bytes()
    assert (tmp_path / "mxnet.idx").read_bytes() == (tmp_path / "native.idx").read_bytes()
    with RecordReader(tmp_path / "mxnet.rec") as reader:
        assert [reader.record(ordinal).image for ordinal in range(4)] == images
        assert reader.record(0).labels == array("f", labels)


def test_a_seed_without_a_shuffle_and_a_key_that_no_json_has_are_told(tmp_path, capsys):
    folder = tmp_path / "imgs"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(photo())
    (folder / "a.txt").write_text("a caption")
    (folder / "b.jpg").write_bytes(photo(1))
    (folder / "b.json").write_text('{"caption": "b"}')
    config = PackConfig(
        sources=(str(folder),), out=str(tmp_path / "o.rec"), proof="none", workers=1, seed=3, caption_key=("alt",)
    )
    assert pack(config).count == 1
    assert "warning: --seed draws the order of --shuffle, which is not given" in capsys.readouterr().err
    (reject,) = (json.loads(line) for line in (tmp_path / "o.rejects.jsonl").read_text().splitlines())
    assert reject["reason"] == "missing-caption"
    assert reject["message"].endswith("b.jpg: its captions are blank, or its .json has no alt")
