"""A manifest that was edited by hand is told by --verify: by its own hash, and by what the files add up to."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inspect_files import copy_set, verified
from pack_files import folder_of
from shard_files import split_set

from rwkvclip_cli.config import InspectConfig, PackConfig
from rwkvclip_cli.data.packing.pack import pack
from rwkvclip_cli.data.shards import manifest_hash
from rwkvclip_cli.inspect import inspect_data


def edit(rec: Path, change: Callable[[dict[str, Any]], object], *, is_forged: bool = False) -> None:
    """Edit the manifest of a set; is_forged: with a hash of itself to fit."""
    path = rec.with_suffix(".manifest.json")
    manifest = json.loads(path.read_text())
    change(manifest)
    if is_forged:
        manifest["hashes"]["manifest"] = manifest_hash(manifest)
    path.write_text(json.dumps(manifest))


def said(rec: Path, prove: Any = None) -> list[str]:
    return [str(fault) for fault in verified(rec, prove).log.first]


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of one caption, of three, and a reject."""
    folder = folder_of(tmp_path_factory.mktemp("varied") / "imgs", 5)
    for number in range(5):
        (folder / f"{number:03}.txt").write_text("\n".join(f"{number} {'so ' * line}cats" for line in range(3)))
    (folder / "alone.jpg").write_bytes(b"no caption")
    rec = folder.parent / "pairs.rec"
    pack(PackConfig(sources=(str(folder),), out=str(rec), workers=1))
    return rec


STATISTICS = {
    "kept": (lambda found: found["kept"].update(kept=9), 'kept {"kept": 9}, not {"kept": 5}'),
    "rejected": (
        lambda found: found["rejected"].clear(),
        'rejected {}, not {"missing-caption": 1}',
    ),
    "caption_tokens": (lambda found: found["caption_tokens"].update(max=70), "caption_tokens "),
    "mean of caption_tokens": (lambda found: found["caption_tokens"].update(mean=4.5), "caption_tokens "),
    "image_width": (lambda found: found["image_width"].update(min=1), "image_width "),
    "image_height": (lambda found: found["image_height"].update(mean=1), "image_height "),
    "image_bytes": (lambda found: found["image_bytes"].update(max=7), "image_bytes "),
    "no spread": (lambda found: found.update(image_bytes="many"), 'image_bytes "many", not {"min": '),
}


def test_an_untouched_manifest_agrees(varied, packed, prove) -> None:
    assert said(varied, prove) == said(varied) == said(packed, prove) == []


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_that_the_files_contradict_are_told(varied, tmp_path, prove, name) -> None:
    change, shown = STATISTICS[name]
    rec = copy_set(varied, tmp_path)
    edit(rec, lambda manifest: change(manifest["statistics"]), is_forged=True)
    (fault,) = said(rec, prove)
    assert fault.startswith(f"manifest: its statistics say {shown}")


@pytest.mark.parametrize(("name", "value"), [("rejects", 4), ("size_bytes", 12)])
def test_totals_that_the_files_contradict_are_told(varied, tmp_path, name, value) -> None:
    rec = split_set(varied, 2, tmp_path / "out.rec")
    assert said(rec) == []
    edit(rec, lambda manifest: manifest.update({name: value}), is_forged=True)
    (fault,) = said(rec)
    assert fault.startswith(f"manifest: its {name} is {value}, not ")


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["statistics"].update(captions_truncated=3),
        lambda manifest: manifest["statistics"]["image_width"].update(max=5000),
        lambda manifest: manifest["statistics"]["captions_a_record"].update(mean=2.5),
        lambda manifest: manifest["options"].update(quality=90),
        lambda manifest: manifest.update(sources=["elsewhere"]),
        lambda manifest: manifest.pop("tokenizer"),
    ],
)
def test_any_other_edit_is_told_by_the_manifests_own_hash(varied, tmp_path, change) -> None:
    rec = copy_set(varied, tmp_path)
    edit(rec, change)
    (fault,) = said(rec)
    assert fault.startswith("manifest: pairs.manifest.json was changed: SHA-256 ")


@pytest.mark.parametrize("name", ["captions", "context_length"])
def test_a_manifest_of_more_labels_than_any_record_has_is_told_without_counting_to_them(varied, tmp_path, name) -> None:
    rec = copy_set(varied, tmp_path)
    edit(rec, lambda manifest: manifest.update({name: 10**12}), is_forged=True)
    assert {fault.kind for fault in verified(rec, None).log.first} == {"label-width"}


def test_what_a_manifest_looks_like_does_not_matter(varied, tmp_path) -> None:
    rec = copy_set(varied, tmp_path)
    edit(rec, lambda manifest: manifest.update(count=manifest.pop("count")))
    assert said(rec) == []


def test_a_manifest_of_an_older_version_has_no_hash_of_itself(varied, tmp_path) -> None:
    rec = copy_set(varied, tmp_path)
    edit(rec, lambda manifest: manifest["hashes"].pop("manifest"))
    assert said(rec) == []


def test_the_mean_of_tokens_is_not_told_where_captions_may_be_repeated(packed, tmp_path) -> None:
    rec = copy_set(packed, tmp_path)
    edit(rec, lambda manifest: manifest["statistics"]["caption_tokens"].update(mean=99), is_forged=True)
    assert said(rec) == []


def test_image_sizes_are_compared_where_the_proof_is_that_of_the_pack(varied, tmp_path) -> None:
    rec = copy_set(varied, tmp_path)
    edit(rec, lambda manifest: manifest["statistics"]["image_width"].update(max=5000), is_forged=True)
    for proof, code in (("none", 0), ("structure", 0), ("decode", 1)):
        report = inspect_data(InspectConfig(data=str(rec), verify=True, proof=proof, workers=1))
        assert report.exit_code == code, report.text


def test_one_shard_alone_and_a_salvaged_set_are_sound(varied, tmp_path) -> None:
    rec = split_set(varied, 2, tmp_path / "out.rec")
    assert said(rec.with_name("out-00001.rec")) == []
    rec.with_name("out-00001.rec").unlink()
    inspect_data(InspectConfig(data=str(rec), salvage=str(tmp_path / "saved.rec"), proof="none"))
    assert said(tmp_path / "saved.rec") == []
