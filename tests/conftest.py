"""Settings of the whole suite: one thread a process, since tests run beside each other; skips that say why."""

import os
import shutil
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.path.exists("/dev/nvidiactl"):
    # Triton kernels run on CPU tensors then. It is read when a kernel is defined, so before any import of one.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell's background job ignores these, and so would the processes whose handling of them is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

CLUSTER_TOOLS = ("ip", "unshare", "nsenter")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus: int | None = None
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu"):
            if gpus is None:
                import torch

                gpus = torch.cuda.device_count()
            needed = 2 if item.get_closest_marker("multigpu") else 1
            if gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPUs, this machine has {gpus}"))
        if item.get_closest_marker("cluster"):
            missing = [tool for tool in CLUSTER_TOOLS if shutil.which(tool) is None]
            if os.geteuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root, for network namespaces"))
            elif missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"))
