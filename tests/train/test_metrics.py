"""Logs of earlier runs, whole or damaged: what is kept when a run goes on."""

import json
from pathlib import Path

import pytest

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.train.metrics import Metrics


def test_damaged_lines_go_and_earlier_steps_stay(tmp_path: Path) -> None:
    good = json.dumps({"step": 1, "loss": 0.5})
    damaged = [b'{"step": 2, "lo', b"\xff\xfe\x00", b'{"step": null}', b'{"step": "1"}', b"[" * 100_000, b'{"step": 9}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good.encode(), *damaged]))
    metrics = Metrics(tmp_path, first_step=3)
    metrics.write({"step": 3, "loss": 0.25, "mfu": None})
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]


def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = Metrics(tmp_path, first_step=1)
    with pytest.raises(RwkvClipError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        metrics.write({"step": 1, "loss": 0.5})
    metrics.close()
