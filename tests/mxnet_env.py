"""Make `.venv-mxnet`, where the real mxnet 1.9.1 runs, so that tests can compare files with it byte for byte.

    $ python tests/mxnet_env.py

It has an environment of its own because the archived mxnet imports only beside numpy < 1.24, which ends at Python 3.11.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / ".venv-mxnet"
PACKAGES = ("mxnet==1.9.1", "numpy<1.24")
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "2", "--timeout", "30")
INSTALL_TIMEOUT_S = 240


class MxnetUnavailableError(Exception):
    """Why there can be no real mxnet here."""


def ensure_mxnet(folder: Path = FOLDER) -> Path:
    """Return an interpreter that imports mxnet 1.9.1, making its environment where it is not there yet.

    Processes that ask at once wait for one of them to make it. Raises MxnetUnavailableError with the reason.
    """
    python, stamp = folder / "bin" / "python", folder / "made-with.txt"
    wanted = "\n".join(PACKAGES)

    def is_made() -> bool:
        # The stamp comes last, so an interrupted run is noticed; a moved checkout is noticed by the dead link.
        return python.exists() and stamp.exists() and stamp.read_text() == wanted

    if is_made():
        return python
    base = _find_python()
    folder.mkdir(exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made():
            _run([base, "-m", "venv", "--clear", str(folder)])
            _run([str(python), *PIP, *PACKAGES])
            _run([str(python), "-c", "import mxnet"])
            stamp.write_text(wanted)
    finally:
        os.close(lock)
    return python


def _find_python() -> str:
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    # A version manager's stand-in may be on PATH without the version behind it.
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found
    here = ".".join(map(str, sys.version_info[:2]))
    raise MxnetUnavailableError(f"mxnet 1.9.1 needs Python 3.11; this is {here} and PATH has no python3.11")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MxnetUnavailableError(f"{' '.join(command)} took longer than {INSTALL_TIMEOUT_S} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()[-1]
        raise MxnetUnavailableError(f"{' '.join(command)} failed: {said}")


if __name__ == "__main__":
    try:
        print(ensure_mxnet())
    except MxnetUnavailableError as error:
        sys.exit(f"no mxnet: {error}")
