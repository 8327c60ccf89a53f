"""WebDataset tars as sources: files side by side that share a name up to the first dot are one sample.

>>> [item.source for item in read_tar("shard-00000.tar")]  # cat.jpg, cat.txt
['shard-00000.tar:cat.jpg']

Read with our own walk over the headers, because `tarfile` takes a damaged header for the end of the archive.
"""

import bz2
import gzip
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from rwkvclip_cli.data.packing.samples import (
    MAX_IMAGE_BYTES,
    MAX_SIDECAR_BYTES,
    Ignored,
    Item,
    Reject,
    Sample,
    Sidecar,
    sidecar_kind,
)

MAGIC_BYTES = 6
BLOCK = tarfile.BLOCKSIZE
MAX_SPARSE_BYTES = 2**26
"""Of a file that a tar stores without its zeros: a few kilobytes there can claim any size."""

# Suffixes of pictures, readable or not: one that no reader knows is to become a reject, not to vanish.
IMAGE_SUFFIXES = frozenset(
    re.split(
        " +",
        "apng avif bmp dds dib gif heic heif ico icns j2c j2k jfif jif jls jp2 jpc jpe jpeg jpf jpg jpx jxl jxr mpo pbm"
        " pcx pfm pgm png pnm ppm psd qoi sgi svg tga tif tiff webp",
    )
)

_OPENERS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
# The last three: chains of extension headers, and extension headers that claim to be larger than memory.
_DAMAGE = (
    tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError,
    RecursionError, MemoryError, OverflowError,
)  # fmt: skip


class _Damaged(Exception):
    """The archive cannot be read from `offset` (bytes, uncompressed) on."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(what)
        self.offset = offset
        self.what = what


@dataclass
class _Group:
    """The files of one sample, as they come."""

    key: str
    image: str = ""
    data: bytes = b""
    fault: Reject | None = None
    sidecars: dict[str, Sidecar] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Caption files that are there but cannot be read, and why."""
    suffixes: set[str] = field(default_factory=set)
    first: str = ""


def read_tar(
    path: str,
    image_key: str | None = None,
    caption_keys: Sequence[str] = (),
    needs_captions: bool = True,
    behind: int = 0,
) -> Iterator[Item]:
    """Yield the samples of a tar (plain, gzip, bzip2 or xz) in order, those `behind` the first so many items.

    The image is the first file of a sample with a picture's suffix, or of the suffix `image_key`. Other files
    alone are ignored. An image without a caption is a reject, unless `needs_captions` is off. Where the tar is
    damaged, what precedes is kept and one reject names the byte. The last of the items left out is not an Ignored one:
    behind such a one the files of a sample may already have been passed, and they are passed unread.
    """
    given = 0

    def is_passed() -> bool:
        return given < behind

    for given, item in enumerate(_read_groups(path, image_key, caption_keys, needs_captions, is_passed), 1):
        if given > behind:
            yield item


def _read_groups(
    path: str, image_key: str | None, caption_keys: Sequence[str], needs_captions: bool, is_passed: Callable[[], bool]
) -> Iterator[Item]:
    """The items, without their images and captions while `is_passed()`."""
    group: _Group | None = None
    try:
        for name, tar, info in _members(path):
            key, suffix = _key(name)
            if not key or not suffix:
                yield Ignored(f"{path}:{name}")
                continue
            if group is not None and (key != group.key or suffix in group.suffixes):
                yield _finish(path, group, caption_keys, needs_captions)
                group = None
            if group is None:
                group = _Group(key, first=name)
            _add(path, group, name, suffix, tar, info, image_key, _pass if is_passed() else _read)
    except _Damaged as damage:
        message = f"{path}: {damage.what} at byte {damage.offset:,}; what precedes is kept"
        if group is not None:
            item = _finish(path, group, caption_keys, needs_captions)
            # A sample that lacks a part here has most likely lost it to the damage: one input, one reject.
            if isinstance(item, Sample):
                yield item
            elif not isinstance(item, Ignored):
                message += f", but for the incomplete sample {group.key}"
        yield Reject(path, "damaged-tar", message)
        return
    if group is not None:
        yield _finish(path, group, caption_keys, needs_captions)


def count_samples(path: str, enough: Callable[[], bool]) -> tuple[int, int] | None:
    """The samples of an uncompressed tar and its bytes, read from its headers alone; None for a compressed one.

    Where `enough()` turns true on the way: those up to there.
    """
    with open(path, "rb") as file:
        if _opener(file.read(MAGIC_BYTES)):
            return None
    count = offset = 0
    last = ""
    try:
        for name, tar, _info in _members(path):
            key, suffix = _key(name)
            kind = suffix.rpartition(".")[2]
            if key and key != last and (kind in IMAGE_SUFFIXES or sidecar_kind(kind)):
                count, last = count + 1, key
            offset = tar.offset
            if count % 64 == 0 and enough():
                return count, offset
    except _Damaged:
        pass
    return count, os.stat(path).st_size


def _key(name: str) -> tuple[str, str]:
    """Folder and base name up to its first dot, and what follows that dot; neither for a hidden file."""
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem, suffix.lower()) if stem else ("", "")


def _add(
    path: str,
    group: _Group,
    name: str,
    suffix: str,
    tar: tarfile.TarFile,
    info: tarfile.TarInfo,
    image_key: str | None,
    read: Callable[[tarfile.TarFile, tarfile.TarInfo], bytes],
) -> None:
    group.suffixes.add(suffix)
    last = suffix.rpartition(".")[2]
    wanted = suffix == image_key.lower() or last == image_key.lower() if image_key else last in IMAGE_SUFFIXES
    kind = sidecar_kind(last)
    source = f"{path}:{name}"
    if wanted and not group.image:
        group.image = name
        if link := _link(info):
            group.fault = Reject(source, "unreadable-image", f"{source} is {link}")
        elif info.size > (most := MAX_SPARSE_BYTES if info.issparse() else MAX_IMAGE_BYTES):
            group.fault = Reject(source, "too-large", f"{source}: {info.size:,} bytes, at most {most:,}")
        else:
            group.data = read(tar, info)
    elif kind and kind not in group.sidecars:
        if link := _link(info):
            group.unread.append(f"{source} is {link}")
        elif info.issparse():
            group.unread.append(f"{source} is stored without its zeros; make the tar without --sparse")
        elif info.size > MAX_SIDECAR_BYTES:
            group.unread.append(f"{source}: a caption file has at most {MAX_SIDECAR_BYTES:,} bytes")
        else:
            group.sidecars[kind] = Sidecar(kind, read(tar, info))


def _link(info: tarfile.TarInfo) -> str:
    """What a member is that has no content of its own, and what to do about it.

    What a link leads to may lie anywhere in the archive or outside of it; this is one pass.
    """
    if info.isreg():
        return ""
    kind, option = ("hard", "--hard-dereference") if info.islnk() else ("symbolic", "--dereference")
    return f"a {kind} link to {info.linkname}; make the tar with {option}"


def _finish(path: str, group: _Group, caption_keys: Sequence[str], needs_captions: bool) -> Item:
    if not group.image:
        source = f"{path}:{group.first}"
        if not group.sidecars and not group.unread:
            return Ignored(source)
        return Reject(source, "missing-image", f"{source}: no image follows with the name {group.key}")
    if group.fault:
        return group.fault
    source = f"{path}:{group.image}"
    if not group.sidecars and group.unread and needs_captions:
        return Reject(source, "unreadable-caption", "; ".join(group.unread))
    if not group.sidecars and needs_captions:
        return Reject(
            source, "missing-caption", f"{source}: no {group.key}.txt or .json next to it in the tar (tar --sort=name)"
        )
    sidecars = tuple(group.sidecars[kind] for kind in ("txt", "json") if kind in group.sidecars)
    return Sample(source, group.data, sidecars=sidecars, caption_keys=tuple(caption_keys))


def _read(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    try:
        file = tar.extractfile(info)
        data = file.read() if file else b""
    except _DAMAGE as error:
        raise _Damaged(info.offset, f"{info.name} is cut off ({error})") from error
    if len(data) != info.size:
        raise _Damaged(info.offset, f"{info.name} is cut off")
    return data


def _pass(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    return b""


def _members(path: str) -> Iterator[tuple[str, tarfile.TarFile, tarfile.TarInfo]]:
    """Name (without a leading ./), archive and header of every file and link, or _Damaged where the walk ends early."""
    with _open(path) as stream:
        tar = _Walker(fileobj=stream, mode="r")
        while True:
            info = _next_header(tar, stream)
            if info is None:
                return
            if info.isreg() or info.islnk() or info.issym():
                name = info.name
                while name.startswith("./"):
                    name = name[2:]
                yield name, tar, info


class _Walker(tarfile.TarFile):
    """A TarFile that reads nothing by itself: it lends its header parsing and its readers of (sparse) members."""

    def next(self) -> tarfile.TarInfo | None:
        """Nothing: `_members` walks."""
        return None


def _next_header(tar: tarfile.TarFile, stream: IO[bytes]) -> tarfile.TarInfo | None:
    """The next header, in archives joined end to end too, or None at the end of the file."""
    zeros = 0
    while True:
        at = tar.offset
        try:
            stream.seek(at)
            info = tarfile.TarInfo.fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            zeros += 1
            tar.offset = at + BLOCK
        except tarfile.EmptyHeaderError as error:  # type: ignore[attr-defined]
            if zeros:
                return None
            raise _Damaged(at, "cut off: no end-of-archive mark") from error
        except _DAMAGE as error:
            raise _Damaged(at, f"no valid header ({error or type(error).__name__})") from error
        else:
            # A size below zero would lead back to a header that was read before, for ever.
            if tar.offset <= at or info.size < 0:
                raise _Damaged(at, "a header with a size below zero")
            return info


def _open(path: str) -> IO[bytes]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - the caller closes it
        opener = _opener(file.read(MAGIC_BYTES))
        file.seek(0)
    except OSError as error:
        raise _Damaged(0, f"cannot be read ({error.strerror})") from error
    return opener(file) if opener else file


def _opener(start: bytes) -> Callable[[IO[bytes]], IO[bytes]] | None:
    """What decompresses a file of these first bytes, or None for a plain one."""
    return next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
