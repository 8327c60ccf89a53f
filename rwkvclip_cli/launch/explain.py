"""Known errors of torchrun, gloo and NCCL in two lines each: the cause, and what to do.

>>> explain("RuntimeError: CUDA error: invalid device ordinal").cause
'a rank asks for a GPU that this process cannot see'
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """Why an error happens, and what mends it."""

    pattern: str
    cause: str
    cure: str


# In order: the first that matches wins, so the particular stands before the general.
KNOWN_ERRORS = (
    Explanation(
        r"EADDRINUSE|[Aa]ddress already in use",
        "another program already listens on the rendezvous port",
        "choose another port in --rdzv-endpoint, the same on every node; `ss -ltnp` names the owner",
    ),
    Explanation(
        r"invalid device ordinal",
        "a rank asks for a GPU that this process cannot see",
        "lower --gpus, or look at CUDA_VISIBLE_DEVICES and `nvidia-smi -L`",
    ),
    Explanation(
        r"Duplicate GPU detected",
        "two ranks use the same GPU, which NCCL refuses",
        "start no more ranks than GPUs, and give each LOCAL_RANK a device of its own",
    ),
    Explanation(
        r"RendezvousTimeoutError|RendezvousClosedError|Timed out .*waiting for clients",
        "not every node joined in time: one was not started, died early, or uses another --rdzv-id or endpoint",
        "run the same command on each of the --nodes machines, and check that they reach the endpoint's port",
    ),
    Explanation(
        r"127\.0\.1\.1|(?:gloo|connectFullMesh|Gloo)[^\n]*127\.0\.0\.1",
        "gloo published a loopback address, because /etc/hosts maps this machine's name to one",
        "set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes, such as eth0",
    ),
    Explanation(
        r"RendezvousConnectionError|client socket has failed to connect|Failed to connect to .*host",
        "the rendezvous endpoint does not answer",
        "start node 0 first, and check the address, the port and the firewall of --rdzv-endpoint",
    ),
    Explanation(
        r"ncclUnhandledCudaError|ncclSystemError|unhandled system error|NCCL error in:.*unhandled",
        "a system call or driver call inside NCCL failed: often /dev/shm is full, a limit too low or a link down",
        "run again with --nccl-debug INFO and read its WARN lines; in a container raise --shm-size, --ulimit memlock",
    ),
    Explanation(
        r"Mismatched NCCL version|ncclInvalidUsage",
        "the ranks disagree about the communicator, as with different NCCL versions",
        "install the same torch everywhere; `rwkvclip nccl-check` shows each rank's versions",
    ),
    Explanation(
        r"Connection closed by peer|Connection reset by peer|Connection was likely closed",
        "another rank ended first, and this one only noticed",
        "look for the error of the other rank, on the other nodes too",
    ),
    Explanation(
        r"CUDA out of memory|torch\.OutOfMemoryError",
        "the GPU's memory does not hold this batch",
        "lower --batch-size",
    ),
)


def explain(text: str) -> Explanation | None:
    """The first known error that the text shows, or None."""
    return next((known for known in KNOWN_ERRORS if re.search(known.pattern, text)), None)
