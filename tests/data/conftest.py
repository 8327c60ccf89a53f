"""What the tests of packing share: the real mxnet, and a published tokenizer to compare with."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from mxnet_env import MxnetUnavailableError, ensure_mxnet

OPEN_CLIP = "open_clip_torch==3.3.0"


@pytest.fixture(scope="session")
def run_mxnet() -> Callable[..., None]:
    """Run a program with arguments where `import mxnet` gives 1.9.1; skips where there can be none."""
    try:
        python = ensure_mxnet()
    except MxnetUnavailableError as error:
        pytest.skip(str(error))

    def run(program: str, *arguments: str | Path) -> None:
        command = [str(python), "-c", program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(scope="session")
def open_clip_tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """open_clip's tokenizer.py out of its wheel, which is kept in pytest's cache; skips where it cannot be had."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("open_clip") if cache else tmp_path_factory.mktemp("open_clip")
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        source = folder / OPEN_CLIP / "open_clip" / "tokenizer.py"
        if not source.exists():
            _fetch_open_clip(folder)
    finally:
        os.close(lock)
    spec = importlib.util.spec_from_file_location("open_clip_tokenizer", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fetch_open_clip(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "2", OPEN_CLIP]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip(f"{OPEN_CLIP} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("open_clip_torch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        # The source last: it is what shows that the folder is complete.
        for member in ("open_clip/bpe_simple_vocab_16e6.txt.gz", "open_clip/tokenizer.py"):
            archive.extract(member, folder / OPEN_CLIP)
