"""What a pack is made of, and whether an unfinished or a finished one is made of the same.

>>> refuse_differences(journal.made_of, made_of(config, parts))
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from rwkvclip_cli import __version__
from rwkvclip_cli.config import PackConfig, option_fields, option_name
from rwkvclip_cli.console import UsageError, counted
from rwkvclip_cli.data.packing.growing import ANEW
from rwkvclip_cli.data.packing.reading import Part, look_at, parts_of
from rwkvclip_cli.data.packing.samples import SourceOptions, printable
from rwkvclip_cli.data.packing.sources import count_inputs

# Options that have no part in the bytes of the files.
FREE_OPTIONS = ("out", "workers", "writer", "overwrite", "resume", "json")


def made_of(config: PackConfig, parts: Sequence[Part]) -> dict[str, Any]:
    """Options and sources, and the files' sizes and times, as they are after a way through JSON."""
    options = {
        field.name: getattr(config, field.name) for field in option_fields(PackConfig) if field.name not in FREE_OPTIONS
    }
    files = [dataclasses.astuple(part) for part in parts]
    if config.tokens:
        files.append(dataclasses.astuple(look_at("tokens", config.tokens)))
    document = {"version": __version__, "options": options, "files": files}
    return dict(json.loads(json.dumps(document)))


def refuse_differences(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise UsageError that names the first difference between what two packs are made of."""
    if old == new:
        return
    if old["version"] != new["version"]:
        raise _differs(f"by rwkvclip {old['version']}, this is {new['version']}")
    fields = {field.name: field for field in option_fields(PackConfig)}
    for name in fields:
        was, is_ = old["options"].get(name), new["options"].get(name)
        if was != is_:
            shown = "sources" if fields[name].metadata["argument"] else f"--{option_name(fields[name])}"
            if isinstance(was, bool):
                raise _differs(
                    f"with {shown}, this command is without" if was else f"without {shown}, this command has it"
                )
            raise _differs(f"with {shown} {_shown(was)}, this command has {_shown(is_)}")
    before = {(kind, path): rest for kind, path, *rest in old["files"]}
    now = {(kind, path): rest for kind, path, *rest in new["files"]}
    for key in [*now, *before]:
        if before.get(key) != now.get(key):
            how = "is new" if key not in before else "is gone" if key not in now else "has changed"
            raise UsageError(f"--resume: {printable(key[1])} {how} since the unfinished pack began", ANEW)
    raise UsageError("--resume: the sources' files come in another order than in the unfinished pack", ANEW)


def refuse_other_settings(out: str, manifest: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise UsageError where a finished set's manifest says other settings than those `wanted`, in the same form."""
    for name, value in (wanted | wanted["options"]).items():
        was = manifest["options"].get(name) if name in wanted["options"] else manifest.get(name)
        if name != "options" and was != value:
            raise UsageError(
                f"--resume: {printable(out)} is complete already; it has {name} {_shown(was)}, this command"
                f" {_shown(value)}",
                "--overwrite packs it anew",
            )


def changed_since(
    found: Sequence[tuple[str, str]], options: SourceOptions, tokens: str | None, when_ns: int, inputs: int
) -> str:
    """How the sources differ from those of a pack of so many inputs that was finished at `when_ns`; "" if in nothing.

    For that the times of all files are looked at, and inputs are counted where this reads no more than names. A file
    may be older than the pack and yet have come after it: then the system's own time of its last change tells. Raises
    UsageError for a source that is gone.
    """
    parts = parts_of(found) + ([look_at("tokens", tokens)] if tokens else [])
    replaced = ""
    for part in parts:
        for path in _files_below(part.path, options) if part.changed_ns is None else [part.path]:
            with contextlib.suppress(OSError):  # a link that leads nowhere
                status = os.stat(path)
                if status.st_mtime_ns > when_ns:
                    return f"{printable(path)} has changed since"
                if status.st_ctime_ns > when_ns:
                    replaced = replaced or path
    count = count_inputs(found, options)
    if count is not None and count != inputs:
        return f"the sources now hold {counted(count, 'input')}, {inputs:,} were packed or rejected"
    return f"{printable(replaced)} was replaced since, or its name or permissions were changed" if replaced else ""


def _files_below(folder: str, options: SourceOptions) -> Iterator[str]:
    """The files that may be inputs; none of those behind a link to a folder."""
    for above, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        real = os.path.realpath(above)
        for name in names:
            path = os.path.join(above, name)
            if not name.startswith(".") and os.path.join(real, name) not in options.skip:
                yield path


def _differs(how: str) -> UsageError:
    return UsageError(f"--resume: the unfinished pack was begun {how}", ANEW)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return printable(" ".join(map(str, value))) or "none"
    return "none" if value is None else printable(str(value))
