"""Which NVIDIA GPUs a process started now would see, found without torch or CUDA.

>>> visible_gpus(["GPU-aa11", "GPU-bb22"], "1")
[1]
"""

import ctypes
import os
import re
from pathlib import Path
from typing import Any

NVML_LIBRARY = "libnvidia-ml.so.1"
NVML_TEXT_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE of nvml.h, its longest text buffer
PROC_GPUS = Path("/proc/driver/nvidia/gpus")


def count_visible_gpus() -> int:
    """How many GPUs CUDA would offer a process of this environment, CUDA_VISIBLE_DEVICES included."""
    return len(visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def visible_gpus(uuids: list[str], selection: str | None) -> list[int]:
    """Indices into `uuids` that a value of CUDA_VISIBLE_DEVICES leaves visible, in its order.

    CUDA's rules: unset means all, an empty text none; entries are numbers or unambiguous beginnings of
    UUIDs; the list ends before the first entry that names no GPU; a GPU named twice voids the list. Of
    MIG partitions CUDA offers a process one, whatever the number named.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if selection is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in selection.split(",")):
        if entry.startswith("MIG"):
            return chosen or ([0] if uuids else [])
        index = _index_of(entry, uuids)
        if index is None:
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def _index_of(entry: str, uuids: list[str]) -> int | None:
    if number := re.match(r"\+?\d+", entry):
        index = int(number.group())
        return index if index < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [index for index, uuid in enumerate(uuids) if uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def list_gpus() -> list[str]:
    """UUIDs of all GPUs that this machine (or container) holds: from NVML, else from the driver's /proc files."""
    nvml = _open_nvml()
    if nvml is None:
        return gpus_in_proc(PROC_GPUS, Path("/dev"))
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        return [_nvml_uuid(nvml, index) for index in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def driver_version() -> str | None:
    """The NVIDIA driver's version, such as 570.124.06, or None without a driver."""
    nvml = _open_nvml()
    if nvml is None:
        return None
    try:
        text = ctypes.create_string_buffer(NVML_TEXT_BYTES)
        failed = nvml.nvmlSystemGetDriverVersion(text, NVML_TEXT_BYTES)
        return None if failed else text.value.decode()
    finally:
        nvml.nvmlShutdown()


def gpus_in_proc(folder: Path, devices: Path) -> list[str]:
    """UUIDs of the GPUs in the driver's /proc folder whose device file is here too.

    A container sees every GPU of the host in /proc, but only its own in /dev.
    """
    found: list[str] = []
    for information in sorted(folder.glob("*/information")):
        text = information.read_text(errors="replace")
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if minor and not (devices / f"nvidia{minor.group(1)}").exists():
            continue
        uuid = re.search(r"GPU UUID:\s*(\S+)", text)
        found.append(uuid.group(1) if uuid else information.parent.name)
    return found


def _open_nvml() -> Any | None:
    try:
        nvml = ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return None
    return nvml if nvml.nvmlInit_v2() == 0 else None


def _nvml_uuid(nvml: Any, index: int) -> str:
    handle = ctypes.c_void_p()
    text = ctypes.create_string_buffer(NVML_TEXT_BYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return f"index-{index}"
    if nvml.nvmlDeviceGetUUID(handle, text, NVML_TEXT_BYTES) != 0:
        return f"index-{index}"
    return text.value.decode()
