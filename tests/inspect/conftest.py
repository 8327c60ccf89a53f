"""The set that every test of inspection starts from, packed once."""

from pathlib import Path

import pytest
from inspect_files import Prove, proof_in_process
from pack_files import folder_of

from rwkvclip_cli.config import PackConfig
from rwkvclip_cli.data.packing.pack import pack

RECORDS = 8


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight photographs as `pack` writes them: pairs.rec and the files beside it."""
    folder = tmp_path_factory.mktemp("inspect")
    source = folder_of(folder / "imgs", RECORDS)
    pack(PackConfig(sources=(str(source),), out=str(folder / "pairs.rec"), workers=1))
    return folder / "pairs.rec"


@pytest.fixture(scope="session")
def prove() -> Prove:
    """The decoding proof in this process."""
    return proof_in_process()
