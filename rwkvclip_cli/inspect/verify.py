"""`rwkvclip inspect DATA.rec --verify`: is this set what was packed, and will every record train?

>>> verify(read_beside(locate("pairs.rec")), None).is_sound
True
"""

import hashlib
import os
from collections import deque
from dataclasses import dataclass

from rwkvclip_cli.console import counted, progress
from rwkvclip_cli.data.shards import OWN_HASH, manifest_hash
from rwkvclip_cli.data.shards import beside as path_beside
from rwkvclip_cli.inspect.check import Prover, check_records
from rwkvclip_cli.inspect.faults import Fault, FaultLog
from rwkvclip_cli.inspect.files import Beside, Part
from rwkvclip_cli.inspect.index import read_listing
from rwkvclip_cli.inspect.recount import Recount
from rwkvclip_cli.inspect.scan import RecFile

HASH_BYTES = 1 << 20
LISTS = ("rejects", "sources")


@dataclass(frozen=True)
class Verdict:
    """What a verification found. records: whole ones; sound: those of them without a fault of their own.

    hashed: whether the .rec files were compared with their hash; lists_hashed: which of rejects and sources were.
    """

    records: int
    sound: int
    log: FaultLog
    hashed: bool
    lists_hashed: tuple[str, ...]
    checksums: int

    @property
    def is_sound(self) -> bool:
        """Whether nothing at all is wrong."""
        return not self.log.total


def verify(beside: Beside, prover: Prover | None, proof: str = "decode") -> Verdict:
    """Check the indexes against the records in both directions, every record, the manifest and the hashes.

    proof: the name of what `prover` does.
    """
    log = FaultLog()
    for fault in beside.misplaced:
        log.add(fault)
    records = sound = checksums = 0
    packed_with = beside.manifest.get("options")
    recount = Recount(beside, sizes_as_packed=isinstance(packed_with, dict) and packed_with.get("proof") == proof)
    content = _Content(beside, log) if beside.is_ours else None
    with progress(_expected(beside), "verifying", "records") as bar:
        for checked in check_records(beside, prover, log):
            recount.add(checked)
            records += checked.record is not None
            sound += checked.record is not None and not checked.faults
            checksums += checked.origin is not None and checked.origin.checksum is not None
            if content is not None:
                content.take_in(checked.part, checked.offset or 0)
            bar.advance(1, counted(log.total, "fault") if log.total else "")
    if beside.fault:
        log.add(Fault("manifest", beside.fault))
    _check_manifest(beside, records, log)
    if content is not None:
        content.finish()
    lists = _check_lists(beside, log)
    # What is changed otherwise adds up to something else, of course.
    if not log.total:
        for fault in recount.faults():
            log.add(fault)
    _check_own_hash(beside, log)
    return Verdict(records, sound, log, content is not None, lists, checksums)


def _check_lists(beside: Beside, log: FaultLog) -> tuple[str, ...]:
    """Compare rejects and sources with the hashes that the manifest has, of an older version none; which were compared.

    One that has a hash and is not there is a fault.

    Of the index each entry is compared with the records, so that other line ends are no fault.
    """
    compared = []
    for part, promised in beside.manifest.get("hashes", {}).items():
        if part not in LISTS:
            continue
        path = path_beside(beside.files.rec, part)
        if not path.is_file():
            # That the list of sources is no file may have been told already.
            if not log.counts[part]:
                what = "is no regular file" if os.path.lexists(path) else "is not there"
                log.add(Fault(part, f"{path.name} {what}, and the manifest has its hash"))
            continue
        compared.append(part)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            digest = f"unknown: {error.strerror}"
        # What is wrong with it may have been told already.
        if digest != promised and not log.counts[part]:
            log.add(Fault(part, f"{path.name}: SHA-256 {digest}, packed with {str(promised)[:64]}"))
    return tuple(compared)


def _check_own_hash(beside: Beside, log: FaultLog) -> None:
    """Compare the manifest with its own hash, which older ones have not; what of it is wrong may have been told."""
    promised = beside.manifest.get("hashes", {}).get(OWN_HASH)
    if promised is None or log.counts["manifest"]:
        return
    if (digest := manifest_hash(beside.manifest)) != promised:
        message = f"{beside.files.manifest_path.name} was changed: SHA-256 {digest}, packed with {str(promised)[:64]}"
        log.add(Fault("manifest", message))


class _Content:
    """The SHA-256 of each file and of all of them, a megabyte at a time while it is in memory anyway."""

    def __init__(self, beside: Beside, log: FaultLog) -> None:
        self._beside, self._log = beside, log
        self._waiting = deque(beside.parts)
        self._total = hashlib.sha256()
        self._are_right = True
        self._file: RecFile | None = None
        self._sha256 = self._total
        self._done = 0

    def take_in(self, part: Part, end: int) -> None:
        """Read on to byte `end` of the file of a part, behind all of those before."""
        while self._waiting[0] is not part:
            self._finish_part()
        self._read(end, HASH_BYTES)

    def finish(self) -> None:
        """Read what is left, and note the files that are not what the manifest has the hash of."""
        while self._waiting:
            self._finish_part()
        # The hash of one file that is wrong has been told already.
        if self._are_right and self._total.hexdigest() != self._beside.manifest["content_hash"]:
            self._note(self._total.hexdigest(), self._beside.manifest["content_hash"], None)

    def _finish_part(self) -> None:
        part = self._waiting[0]
        size_bytes = part.rec.stat().st_size if part.rec is not None else 0
        self._read(size_bytes, 1)
        if self._file is not None:
            self._file.close()
        digest = hashlib.sha256().hexdigest() if self._file is None else self._sha256.hexdigest()
        if digest != part.shard.content_hash:
            self._are_right = False
            if part.rec is not None:
                self._note(digest, part.shard.content_hash, part.name)
        self._file, self._done = None, 0
        self._waiting.popleft()

    def _read(self, end: int, at_least: int) -> None:
        rec = self._waiting[0].rec
        if rec is None:
            return
        if self._file is None:
            self._file, self._sha256 = RecFile(rec), hashlib.sha256()
        end = min(end, self._file.size_bytes)
        while end - self._done >= at_least and (
            block := self._file.pread(min(HASH_BYTES, end - self._done), self._done)
        ):
            self._sha256.update(block)
            self._total.update(block)
            self._done += len(block)

    def _note(self, digest: str, wanted: object, name: str | None) -> None:
        self._log.add(Fault("content-hash", f"SHA-256 {digest}, packed with {str(wanted)[:64]}", shard=name))


def _expected(beside: Beside) -> int | None:
    """How many records there should be; None where nothing says it."""
    if beside.manifest:
        return int(beside.manifest["count"])
    indexes = [part.idx for part in beside.parts if part.idx is not None and part.idx.is_file()]
    return sum(len(read_listing(index).offsets) for index in indexes) or None


def _check_manifest(beside: Beside, records: int, log: FaultLog) -> None:
    """Compare count and sizes with what the manifest says."""
    manifest = beside.manifest
    if manifest and manifest["count"] != records:
        log.add(Fault("manifest", f"it counts {counted(manifest['count'], 'record')}; {records:,} can be read"))
    for part in beside.parts:
        if part.rec is not None and part.shard.size_bytes not in (None, size_bytes := part.rec.stat().st_size):
            message = f"it says {part.shard.size_bytes} bytes; {part.rec.name} has {size_bytes:,}"
            log.add(Fault("manifest", message, shard=part.name))
