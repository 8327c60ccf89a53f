"""Many workers under the user's limits: one message that names the limit and what to type, and nothing stays behind."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import plain_environment
from pack_files import folder_of

NOBODY = 65534
COPIES = 2000


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Work for 60 workers, in a folder that another user may write to."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        source = folder_of(Path(name) / "imgs", 1)
        for number in range(1, COPIES):
            os.link(source / "000.jpg", source / f"a{number:04}.jpg")
            os.link(source / "000.txt", source / f"a{number:04}.txt")
        yield Path(name)


# Whoever is not root is counted; what root may read is read all the same, this Python among it.
OTHER_USER = ["setpriv", f"--reuid={NOBODY}", "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]


def packed_under(
    folder: Path,
    number: int,
    limits: tuple[int, int],
    before: list[str] | None = None,
    proof: str = "none",
    workers: int = 64,
) -> tuple[int, str]:
    """(exit code, stderr) of a pack by many workers with a resource limit; `before` is what runs the command."""
    pack = [sys.executable, "-m", "rwkvclip_cli", "pack", "imgs", "o.rec", "--proof", proof]
    command = [*pack, "--workers", str(workers)]
    done = subprocess.run(
        [*(before or []), *command],
        cwd=folder,
        env=plain_environment({"HOME": str(folder), "OPENBLAS_NUM_THREADS": "1"}),
        preexec_fn=lambda: resource.setrlimit(number, limits),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_open_files_that_the_user_may_not_have_are_told(folder: Path) -> None:
    code, said = packed_under(folder, resource.RLIMIT_NOFILE, (64, 64))
    message, hint = said.splitlines()
    assert code == 3
    assert message.startswith("rwkvclip: 64 workers need ")
    assert message.endswith(" open files, and the limit (ulimit -n) is 64")
    assert hint.startswith("  try: --workers ")
    assert os.listdir(folder) == ["imgs"]


def test_a_limit_of_open_files_that_may_be_raised_is_raised(folder: Path) -> None:
    code, said = packed_under(folder, resource.RLIMIT_NOFILE, (64, 4096))
    assert code == 0, said
    for path in folder.glob("o.*"):
        path.unlink()


def test_the_workers_that_the_error_suggests_fit_under_a_limit_that_may_not_be_raised_enough(folder: Path) -> None:
    code, said = packed_under(folder, resource.RLIMIT_NOFILE, (50, 140))
    message, hint = said.splitlines()
    assert code == 3
    assert message.endswith(" open files, and the limit (ulimit -n) is 140")
    workers = int(hint.removeprefix("  try: --workers ").partition(",")[0])
    assert workers > 10
    code, said = packed_under(folder, resource.RLIMIT_NOFILE, (50, 140), workers=workers)
    assert code == 0, said
    for path in folder.glob("o.*"):
        path.unlink()


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes a user without other processes")
@pytest.mark.parametrize(("processes", "proof"), [(1, "none"), (2, "none"), (6, "none"), (6, "decode"), (20, "decode")])
def test_processes_that_the_user_may_not_have_are_told(folder: Path, processes: int, proof: str) -> None:
    if subprocess.run([*OTHER_USER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("setpriv may not keep root's way of reading here")
    code, said = packed_under(folder, resource.RLIMIT_NPROC, (processes, processes), OTHER_USER, proof)
    message, hint = said.splitlines()
    assert code == 3
    assert message.startswith("rwkvclip: the system starts no more processes: ")
    assert message.endswith(f" of 64 workers run, and the user's limit (ulimit -u) is {processes}")
    assert hint.startswith("  try: --workers ")
    assert os.listdir(folder) == ["imgs"]
