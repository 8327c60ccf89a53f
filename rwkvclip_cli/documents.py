"""JSON and TOML as strangers may have written them: what is no document, or is nested too deeply, is a ValueError.

>>> parse_json('{"captions": ["a cat"]}')
{'captions': ['a cat']}
"""

import json
import tomllib
from collections.abc import Iterable
from typing import Any

MAX_LEVELS = 100  # of lists and tables in each other; Python itself gives up at a thousand calls, wherever that may be
TOO_DEEP = f"nested more than {MAX_LEVELS} levels deep"


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError for what is none, and for what is nested too deeply."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    # Counting opening brackets takes next to no time, and few texts have as many.
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_LEVELS:  # type: ignore[arg-type]
        check_levels(document)
    return document


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text says. Raises ValueError for what is none, and for what is nested too deeply."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_levels(document)
    return document


def check_levels(document: Any) -> None:
    """Raise ValueError for lists and tables that lie more than MAX_LEVELS deep in each other."""
    level = [document]
    for _ in range(MAX_LEVELS):
        level = [each for thing in level for each in _inside(thing)]
        if not level:
            return
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(TOO_DEEP)


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return thing.values()
    return thing if isinstance(thing, list) else ()
