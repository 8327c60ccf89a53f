"""Known errors of torchrun, gloo, NCCL and DALI in two lines each: the cause, and what to do.

>>> explain("RuntimeError: CUDA error: invalid device ordinal").cause
'a rank asks for a GPU that this process cannot see'
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """Why an error happens, and what mends it. `elsewhere`: it follows from what another rank or node did."""

    pattern: str
    cause: str
    cure: str
    elsewhere: bool = False


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
        r"RendezvousClosedError",
        "torchrun on another node ended the job, because a rank failed there or somebody stopped it",
        "look for the error on the other nodes",
        elsewhere=True,
    ),
    Explanation(
        r"RendezvousTimeoutError|Timed out .*waiting for clients",
        "not every node joined in time: one was not started, died early, or uses another --rdzv-id or endpoint",
        "run the same command on each of the --nodes machines, and check that they reach the endpoint's port",
    ),
    Explanation(
        r"Connection (?:closed|reset) by (?:remote )?peer|Connection was likely closed|(?:Read|Write) error \["
        r"|ncclRemoteError",
        "another rank ended first, and this one only noticed",
        "look for the error of the other rank, on the other nodes too",
        elsewhere=True,
    ),
    Explanation(
        r"Timed out waiting \d+ms for (?:recv|send) operation|Watchdog caught collective operation timeout",
        "another rank did not take part within --timeout: it hangs, or its machine or network is gone",
        "look at the other nodes' logs and processes; `rwkvclip nccl-check` names a silent rank",
        elsewhere=True,
    ),
    Explanation(
        r"127\.0\.1\.1|connectFullMesh[^\n]*127\.0\.0\.1",
        "gloo published a loopback address, because /etc/hosts maps this machine's name to one",
        "set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes, such as eth0",
    ),
    Explanation(
        r"connectFullMesh failed",
        "gloo published an address that another rank does not reach, or a firewall closes its port",
        "set GLOO_SOCKET_IFNAME to the interface that reaches the other nodes, and let them use any port of it",
    ),
    Explanation(
        r"RendezvousConnectionError|client socket has (?:failed to connect|timed out)|Failed to connect to .*host",
        "the rendezvous endpoint does not answer",
        "start node 0 first, and check the address, the port and the firewall of --rdzv-endpoint",
        elsewhere=True,
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
        r"CUDA out of memory|torch\.OutOfMemoryError|Can't allocate \d+ bytes on device|CUDA allocation failed"
        r"|NVJPEG_STATUS_ALLOCATOR_FAILURE",
        "the GPU's memory does not hold this batch",
        "lower --batch-size",
    ),
    Explanation(
        r"Invalid RecordIO|Incomplete or corrupted record files",
        "the .rec file is damaged or cut short, or the .idx beside it belongs to another file",
        "copy both files again, or pack them anew: rwkvclip pack SOURCE... OUT.rec --overwrite",
    ),
    Explanation(
        r"operator `nvidia\.dali\.fn\.decoders\.|nvImageCodec failure",
        "DALI cannot decode an image of the packed file; it does not say which record holds it",
        "pack again with every image proved, which rejects such ones: rwkvclip pack SOURCE... OUT.rec --overwrite",
    ),
)


def explain(text: str) -> Explanation | None:
    """The first known error that the text shows, or None."""
    return next((known for known in KNOWN_ERRORS if re.search(known.pattern, text)), None)
