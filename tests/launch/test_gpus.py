"""GPUs are counted as CUDA would count them."""

from pathlib import Path

import pytest

from rwkvclip_cli.launch.gpus import count_visible_gpus, driver_version, gpus_in_proc, list_gpus, visible_gpus

UUIDS = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "GPU-cccc4444"]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("0,1,2,3,4", [0, 1, 2, 3]),
        ("0,9,1", [0]),
        ("-1", []),
        ("1,-1,2", [1]),
        ("none", []),
        ("0,,1", [0]),
        ("1,1", []),
        ("GPU-bbbb3333", [2]),
        ("GPU-c,GPU-bbbb", [3, 2]),
        ("gpu-c", []),
        ("GPU-AAAA1", [0]),
        ("GPU-aaaa", []),
        ("GPU-dddd", []),
        ("MIG-5c7b1f,MIG-99", [0]),
    ],
)
def test_visible_gpus(selection: str | None, expected: list[int]) -> None:
    assert visible_gpus(UUIDS, selection) == expected


def test_no_gpu_stays_none() -> None:
    assert visible_gpus([], None) == []
    assert visible_gpus([], "0") == []
    assert visible_gpus([], "MIG-1") == []


def driver_folder(tmp_path: Path) -> Path:
    for bus, minor, uuid in (("0000:01:00.0", 0, "GPU-one"), ("0000:02:00.0", 1, "GPU-two")):
        folder = tmp_path / "gpus" / bus
        folder.mkdir(parents=True)
        folder.joinpath("information").write_text(
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )
    return tmp_path / "gpus"


def test_proc_counts_only_gpus_with_a_device_file(tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "nvidia1").touch()
    assert gpus_in_proc(driver_folder(tmp_path), devices) == ["GPU-two"]


def test_proc_without_a_driver_is_empty(tmp_path: Path) -> None:
    assert gpus_in_proc(tmp_path / "missing", tmp_path) == []


def test_an_empty_selection_hides_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_visible_gpus() == 0


@pytest.mark.gpu
def test_count_agrees_with_torch() -> None:
    import torch

    assert count_visible_gpus() == torch.cuda.device_count()
    assert all(uuid.startswith("GPU-") for uuid in list_gpus())
    assert driver_version()
