"""`rwkvclip inspect`: the mode that its options ask for, and its result as a document and as text.

>>> print(inspect_data(InspectConfig(data="pairs.rec")).text)
"""

from dataclasses import asdict, dataclass
from typing import Any

from rwkvclip_cli.config import InspectConfig
from rwkvclip_cli.console import EXIT_DONE, EXIT_FAILED, counted, page, warn
from rwkvclip_cli.cores import usable_cores
from rwkvclip_cli.data.packed import open_packed
from rwkvclip_cli.data.packing.samples import printable
from rwkvclip_cli.data.shards import locate
from rwkvclip_cli.inspect.check import Prover, pool_prover
from rwkvclip_cli.inspect.export import export
from rwkvclip_cli.inspect.faults import KEPT_FAULTS, Fault
from rwkvclip_cli.inspect.files import Beside, read_beside
from rwkvclip_cli.inspect.index import rebuild_indexes
from rwkvclip_cli.inspect.salvage import salvage
from rwkvclip_cli.inspect.summary import describe_records, summarize
from rwkvclip_cli.inspect.verify import Verdict, verify

# What --plan alone looks at.
PLANNED = ("world_size", "batch_size", "epochs", "lr", "warmup", "train_num_samples")
SHOWN_FAULTS = 20
SHOWN_STATISTICS = {
    "kept": "images as they lie",
    "image_format": "images as they came",
    "image_width": "image width",
    "image_height": "image height",
    "image_bytes": "image bytes",
    "captions_a_record": "captions a record",
    "caption_tokens": "tokens a caption",
    "captions_truncated": "captions cut to the context length",
    "captions_dropped": "captions beyond the slots",
    "captions_blank": "captions that were blank",
    "captions_repeated": "captions that an earlier one equals",
    "rejected": "rejected",
}
SPREADS = frozenset({"image_width", "image_height", "image_bytes", "captions_a_record", "caption_tokens"})


@dataclass(frozen=True)
class Report:
    """What an inspection has to say: `document` for JSON, `text` for people. exit_code: 1 where it found faults."""

    document: dict[str, Any]
    text: str
    exit_code: int = EXIT_DONE


def inspect_data(options: InspectConfig) -> Report:
    """Do what the options ask for. Damage is a result; RwkvClipError says what could not be done because of it."""
    if not options.plan and (
        idle := [name for name in PLANNED if getattr(options, name) != getattr(InspectConfig, name)]
    ):
        warn(f"{', '.join('--' + name.replace('_', '-') for name in idle)}: for --plan alone, which is not given")
    if options.plan:
        from rwkvclip_cli.inspect.plan import plan, plan_text  # brings torch, which no other mode needs

        found = plan(open_packed(options.data), options)
        return _report(options, "plan", found, plan_text(found))
    beside = read_beside(locate(options.data))
    if options.rebuild_index:
        return _rebuild(options, beside)
    if options.verify:
        return _verify(options, beside, _prover(options, beside))
    if options.salvage is not None:
        return _salvage(options, beside, _prover(options, beside))
    if options.export is not None:
        return _export(options, beside)
    if options.records is not None:
        return _records(options, beside)
    return _summary(options, beside)


def _report(options: InspectConfig, mode: str, found: dict[str, Any], text: str, failed: bool = False) -> Report:
    document = {"data": printable(options.data), "mode": mode, **found}
    return Report(document, text, EXIT_FAILED if failed else EXIT_DONE)


def _prover(options: InspectConfig, beside: Beside) -> Prover | None:
    return pool_prover(options.proof, beside, options.workers or usable_cores())


def _rebuild(options: InspectConfig, beside: Beside) -> Report:
    done = rebuild_indexes(beside)
    indexes = [{"index": printable(str(idx)), "records": count} for idx, count in done]
    text = page(f"{idx}: {counted(count, 'record')}" for idx, count in done)
    found = {"indexes": indexes, "records": sum(count for _, count in done)}
    return _report(options, "rebuild-index", found, text)


def _verify(options: InspectConfig, beside: Beside, prover: Prover | None) -> Report:
    verdict = verify(beside, prover, options.proof)
    faults = [fault.document() for fault in verdict.log.first]
    found = {
        "sound": verdict.is_sound,
        "records": verdict.records,
        "sound_records": verdict.sound,
        "size_bytes": beside.size_bytes,
        "proof": options.proof,
        "checksums": verdict.checksums,
        "content_hash_checked": verdict.hashed,
        "lists_checked": list(verdict.lists_hashed),
        "fault_counts": dict(sorted(verdict.log.counts.items())),
        "faults": faults,
        "faults_left_off": verdict.log.total - len(faults),
        "missing": list(beside.missing),
    }
    return _report(options, "verify", found, _verdict_text(options, beside, verdict), not verdict.is_sound)


def _verdict_text(options: InspectConfig, beside: Beside, verdict: Verdict) -> str:
    proved = {
        "decode": "every image decoded in DALI",
        "structure": "every image's markers walked",
        "none": "no image looked at",
    }
    name = printable(options.data)
    basis = [proved[options.proof], *(["content hash compared"] if verdict.hashed else [])]
    basis += [f"{' and '.join(verdict.lists_hashed)} compared with their hashes"] if verdict.lists_hashed else []
    basis += ["captions and images compared with their checksums"] if verdict.checksums else []
    head = f"{name}: {counted(verdict.records, 'record')}, {beside.size_bytes:,} bytes; {', '.join(basis)}"
    if verdict.is_sound:
        return page([head, "sound"])
    lines = [head, f"{counted(verdict.log.total, 'fault')}, {counted(verdict.sound, 'record')} without one"]
    lines += [f"  {kind}: {count:,}" for kind, count in sorted(verdict.log.counts.items())]
    lines += [str(fault) for fault in verdict.log.first[:SHOWN_FAULTS]]
    if verdict.log.total > SHOWN_FAULTS:
        lines.append(f"... --json lists the first {KEPT_FAULTS:,}")
    if all(kind.startswith("index-") for kind in verdict.log.counts):
        lines.append(f"try: rwkvclip inspect {name} --rebuild-index")
    else:
        lines.append(f"try: rwkvclip inspect {name} --salvage SAVED.rec, which keeps every record that is sound")
    return page(lines)


def _salvage(options: InspectConfig, beside: Beside, prover: Prover | None) -> Report:
    assert options.salvage is not None
    saved = salvage(beside, prover, options.salvage)
    lost = sum(saved.lost.values())
    kept = counted(saved.kept, "record")
    lines = [f"{printable(saved.out)}: {kept} kept, {saved.before:,} of them before the first damage"]
    lines.append(f"lost: {lost:,}" + (", each named in the .rejects.jsonl beside it" if lost else ""))
    lines += [f"  {kind}: {count:,}" for kind, count in saved.lost.items()]
    found = asdict(saved) | {"out": printable(saved.out)}
    return _report(options, "salvage", found, page(lines))


def _export(options: InspectConfig, beside: Beside) -> Report:
    assert options.export is not None
    written = export(beside, options.export, options.records)
    folder = printable(written.folder)
    lines = [f"{folder}: {counted(written.count, 'image')}, each with its captions in a .json"]
    if written.changed:
        lines.append(
            f"captions that give other tokens when they are packed again: in {counted(written.changed, 'record')}"
        )
    return _report(options, "export", asdict(written) | {"folder": folder}, page(lines))


def _records(options: InspectConfig, beside: Beside) -> Report:
    assert options.records is not None
    described = describe_records(beside, options.records)
    lines = []
    for entry in described:
        head = f"{entry['shard']}, record {entry['record']}" if "shard" in entry else f"record {entry['record']}"
        head += f" at byte {entry['offset']:,}" if "offset" in entry else ""
        if "format" in entry:
            size = f"{entry['width']}x{entry['height']}"
            head += f": {entry['format']} {size}, {entry['image_bytes']:,} bytes"
        lines.append(f"{head}  {entry['source']}, {entry['kept']}" if "source" in entry else head)
        lines += [f"  {slot}: {caption}" for slot, caption in enumerate(entry.get("captions", []))]
        lines += [f"  fault: {entry['fault']}"] if "fault" in entry else []
    failed = any("fault" in entry for entry in described)
    return _report(options, "records", {"records": described}, page(lines) or "no records", failed)


def _summary(options: InspectConfig, beside: Beside) -> Report:
    found = summarize(beside)
    name, manifest = printable(options.data), found["manifest"]
    lines = [f"{name}: {counted(found['records'], 'record')}, {found['size_bytes']:,} bytes"]
    shards = [part.shard.rec.name for part in beside.parts if part.name is not None]
    if shards:
        lines.append(f"  shards: {len(shards):,}, {shards[0]} to {shards[-1]}")
    lines.append(
        f"  labels: {found['label_width']}, {found['captions']} captions of {found['context_length']} token ids"
    )
    if "tokenizer" in manifest:
        lines.append(f"  tokenizer: {_name_of(manifest['tokenizer'])}")
    if "sources" in manifest:
        lines.append(f"  packed from: {_names(manifest['sources'])}")
    if "shuffled" in manifest:
        lines.append(f"  order: {'shuffled' if manifest['shuffled'] else 'as in the sources'}")
    if "rejects" in manifest:
        lines.append(f"  rejects: {manifest['rejects']}")
    lines += _statistics_lines(found["statistics"])
    if "content_hash" in manifest:
        lines.append(f"  content hash: {manifest['content_hash']}")
    if found["missing"]:
        lines.append(f"  missing: {', '.join(found['missing'])}")
    lines += [f"  fault: {Fault(**fault)}" for fault in found["faults"]]
    lines += [f"try: rwkvclip inspect {name} --verify, which looks at every record"] if found["faults"] else []
    return _report(options, "summary", found, page(lines), bool(found["faults"]))


def _statistics_lines(statistics: object) -> list[str]:
    """What the manifest's statistics say, as far as they are there."""
    known = statistics if isinstance(statistics, dict) else {}
    lines = []
    for name, words in SHOWN_STATISTICS.items():
        value = known.get(name)
        if isinstance(value, dict) and name in SPREADS:
            shown = ", ".join(f"{each} {value.get(each)}" for each in ("min", "mean", "max"))
        elif isinstance(value, dict):
            shown = ", ".join(f"{each} {count}" for each, count in value.items())
        else:
            shown = str(value)
        lines += [f"  {words}: {shown}"] if name in known and value != {} else []
    return lines


def _name_of(tokenizer: object) -> str:
    return str(tokenizer.get("name")) if isinstance(tokenizer, dict) else str(tokenizer)


def _names(sources: object) -> str:
    return ", ".join(map(str, sources)) if isinstance(sources, list) else str(sources)
