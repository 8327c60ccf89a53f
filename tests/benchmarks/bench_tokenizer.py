"""Captions a second: this package's tokenizer beside open_clip's SimpleTokenizer, in the same run on one core.

    $ python tests/benchmarks/bench_tokenizer.py open_clip/tokenizer.py [CAPTIONS.txt | SET.tar ...]

The first argument is tokenizer.py out of an unpacked open_clip_torch wheel. Captions come from text files, a caption a
line, and from WebDataset tars (.txt and .json); by default from the tests' demo.tar. `cold` includes loading the table
and meets each word for the first time; `warm` is a second pass.
"""

import importlib.util
import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from rwkvclip_cli.data import captions
from rwkvclip_cli.data.captions import Tokenizer

DEMO = Path(__file__).parent.parent / "data" / "demo.tar"
ROUNDS = 3


def read_captions(path: Path) -> Iterator[str]:
    """The captions of a text file or a WebDataset tar."""
    if path.suffix != ".tar":
        yield from path.read_text("utf-8").splitlines()
        return
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None and member.name.endswith(".txt"):
                yield from file.read().decode("utf-8").splitlines()
            elif file is not None and member.name.endswith(".json"):
                yield from json.load(file)["captions"]


def load_module(path: str) -> ModuleType:
    """open_clip's tokenizer.py, without the package around it."""
    spec = importlib.util.spec_from_file_location("open_clip_tokenizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes, once."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(module_path: str, *paths: str) -> None:
    """Check that both give the same ids, then time them by turns and print the best round of each."""
    texts = [text for path in paths or [DEMO] for text in read_captions(Path(path))]
    module = load_module(module_path)
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        captions._table.cache_clear()
        for name, make in (("open_clip", module.SimpleTokenizer), ("rwkvclip", Tokenizer)):
            made = []
            cold = seconds(lambda make=make, made=made: made.append(make()) or [made[0].encode(text) for text in texts])
            warm = seconds(lambda made=made: [made[0].encode(text) for text in texts])
            times.setdefault(f"{name} cold", []).append(cold)
            times.setdefault(f"{name} warm", []).append(warm)
            ids = [made[0].encode(text) for text in texts]
            if name == "open_clip":
                expected = ids
            elif ids != expected:
                sys.exit("the two tokenizers differ: no figure means anything")
    print(f"{len(texts):,} captions, {sum(map(len, texts)) / len(texts):.0f} characters on average")
    for kind in ("cold", "warm"):
        theirs, ours = min(times[f"open_clip {kind}"]), min(times[f"rwkvclip {kind}"])
        print(
            f"{kind}: rwkvclip {len(texts) / ours:,.0f} captions/s, open_clip {len(texts) / theirs:,.0f}:"
            f" {theirs / ours:.1f} times"
        )


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
