"""What a pack is made of, and whether an unfinished or a finished one is made of the same.

>>> refuse_differences(journal.made_of, made_of(config, parts))
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rwkvclip_cli import __version__
from rwkvclip_cli.config import PackConfig, option_fields, option_name
from rwkvclip_cli.console import UsageError
from rwkvclip_cli.data.packing.growing import ANEW
from rwkvclip_cli.data.packing.reading import Part, look_at
from rwkvclip_cli.data.packing.samples import printable

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
            raise _differs(f"with {shown} {_shown(was)}, this command has {_shown(is_)}")
    before = {(kind, path): rest for kind, path, *rest in old["files"]}
    now = {(kind, path): rest for kind, path, *rest in new["files"]}
    for key in [*now, *before]:
        if before.get(key) != now.get(key):
            how = "is new" if key not in before else "is gone" if key not in now else "has changed"
            raise UsageError(f"--resume: {printable(key[1])} {how} since the unfinished pack began", ANEW)
    raise UsageError("--resume: the sources' files come in another order than in the unfinished pack", ANEW)


def _differs(how: str) -> UsageError:
    return UsageError(f"--resume: the unfinished pack was begun {how}", ANEW)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return printable(" ".join(map(str, value))) or "none"
    return "none" if value is None else printable(str(value))
