"""`rwkvclip inspect DATA.rec --verify`: is this set what was packed, and will every record train?

>>> verify(Path("pairs.rec")).total
0
"""

import hashlib
from dataclasses import dataclass

from rwkvclip_cli.console import progress
from rwkvclip_cli.inspect.check import Prover, check_records
from rwkvclip_cli.inspect.faults import Fault, FaultLog
from rwkvclip_cli.inspect.files import Beside
from rwkvclip_cli.inspect.index import Listing, read_listing
from rwkvclip_cli.inspect.scan import RecFile

HASH_BYTES = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """What a verification found. records: whole ones in the file; sound: those of them without a fault of their own."""

    records: int
    sound: int
    log: FaultLog
    hashed: bool
    checksums: int

    @property
    def is_sound(self) -> bool:
        """Whether nothing at all is wrong."""
        return not self.log.total


def verify(file: RecFile, beside: Beside, prover: Prover | None) -> Verdict:
    """Check the index against the records in both directions, every record, the manifest and the hash."""
    log = FaultLog()
    listing = _listing(beside, log)
    records = sound = checksums = 0
    expected = beside.manifest.get("count") if beside.manifest else (len(listing.offsets) or None if listing else None)
    content = _Content(file) if beside.is_ours else None
    with progress(expected, "verifying", "records") as bar:
        for checked in check_records(file, beside, listing, prover, log):
            records += checked.record is not None
            sound += checked.record is not None and not checked.faults
            checksums += checked.origin is not None and checked.origin.checksum is not None
            if content is not None:
                content.take_in(checked.end)
            bar.advance(1, f"{log.total:,} faults" if log.total else "")
    if beside.fault:
        log.add(Fault("manifest", beside.fault))
    _check_manifest(file, beside, records, log)
    if content is not None and content.digest() != beside.manifest["content_hash"]:
        message = f"SHA-256 {content.digest()}, packed with {str(beside.manifest['content_hash'])[:64]}"
        log.add(Fault("content-hash", message))
    return Verdict(records, sound, log, content is not None, checksums)


class _Content:
    """The SHA-256 of a file, a megabyte at a time while it is in memory anyway."""

    def __init__(self, file: RecFile) -> None:
        self._file, self._sha256, self._done = file, hashlib.sha256(), 0

    def take_in(self, end: int, at_least: int = HASH_BYTES) -> None:
        """Read on to `end`, which may lie before or behind what there is; not for less than `at_least` bytes."""
        end = min(end, self._file.size_bytes)
        while end - self._done >= at_least and (
            block := self._file.pread(min(HASH_BYTES, end - self._done), self._done)
        ):
            self._sha256.update(block)
            self._done += len(block)

    def digest(self) -> str:
        """The hash (hexadecimal) of all of it."""
        self.take_in(self._file.size_bytes, 1)
        return self._sha256.hexdigest()


def _listing(beside: Beside, log: FaultLog) -> Listing | None:
    if not beside.idx.is_file():
        log.add(Fault("index-missing", f"there is no {beside.idx.name}"))
        return None
    listing = read_listing(beside.idx)
    log.counts += listing.faults.counts
    log.first += listing.faults.first
    return listing


def _check_manifest(file: RecFile, beside: Beside, records: int, log: FaultLog) -> None:
    """Compare count and size with what the manifest says."""
    manifest = beside.manifest
    if manifest and manifest["count"] != records:
        log.add(Fault("manifest", f"it counts {manifest['count']:,} records; {records:,} can be read"))
    if "size_bytes" in manifest and manifest["size_bytes"] != file.size_bytes:
        message = f"it says {manifest['size_bytes']} bytes; {file.path.name} has {file.size_bytes:,}"
        log.add(Fault("manifest", message))
