"""Errors as torch, gloo, NCCL and DALI word them get the right cause."""

from pathlib import Path

import pytest
from helpers import jpeg

from rwkvclip_cli.data.recordio import Record, RecordWriter, pack_record
from rwkvclip_cli.launch.explain import KNOWN_ERRORS, explain


def dali(operator: str, fault: str) -> str:
    """How DALI 2.4 words a fault in a run: the operator, where the pipeline names it, the fault; no record."""
    return (
        f"RuntimeError: Critical error in pipeline:\nCritical error in pipeline:\nError in {operator},\n"
        "which was used in the pipeline definition with the following traceback:\n\n"
        '  File "loader.py", line 246, in _build\n    jpegs, labels = fn.readers.mxnet(\n\n'
        f"encountered:\n\n{fault}\nCurrent pipeline object is no longer valid.\n"
        "Current pipeline object is no longer valid."
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
            "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "already listens",
        ),
        ("torch.AcceleratorError: CUDA error: invalid device ordinal", "cannot see"),
        ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000", "same GPU"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "joined in time"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "another node ended the job"),
        (
            "torch.distributed.DistNetworkError: The client socket has timed out after 10000ms while trying to connect "
            "to (10.0.0.1, 29500).",
            "does not answer",
        ),
        (
            "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for clients. 1/2 clients joined.",
            "joined in time",
        ),
        (
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] "
            "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:433$1",
            "loopback address",
        ),
        (
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] "
            "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:16274$1",
            "loopback address",
        ),
        (
            "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.h:311] "
            "Connect timeout [none]",
            "another rank does not reach",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.27.5 ncclSystemError: System call failed",
            "inside NCCL failed",
        ),
        ("gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4021", "another rank ended first"),
        ("gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4021", "another rank ended first"),
        (
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.1.1]:57012: "
            "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in the application.",
            "another rank ended first",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a "
            "network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a network error or a "
            "remote process exiting prematurely.",
            "another rank ended first",
        ),
        (
            "gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:4021: Connection timed out",
            "another rank ended first",
        ),
        (
            "gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete",
            "did not take part within --timeout",
        ),
        (
            "torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.",
            "did not take part within --timeout",
        ),
        ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection", "does not answer"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "does not hold"),
        (
            dali("Mixed operator `nvidia.dali.fn.decoders.image`", "Can't allocate 129499136 bytes on device 0."),
            "not hold",
        ),
        (
            dali("CPU operator `nvidia.dali.fn.decoders.image`", "nvImageCodec failure: '#3'"),
            "does not say which record",
        ),
        (
            dali("Mixed operator `nvidia.dali.fn.decoders.image_random_crop`", "nvImageCodec failure: '#4'"),
            "does not say which record",
        ),
        (
            dali(
                "CPU operator `nvidia.dali.fn.readers.mxnet`",
                "Invalid RecordIO file: pairs.rec at index 5300 (record payload requires 749 bytes, but only 552 bytes "
                "are available).",
            ),
            "damaged or cut short",
        ),
        (
            dali(
                "CPU operator `nvidia.dali.fn.readers.mxnet`",
                'Assert on "magic == kMagic" failed: Invalid RecordIO: wrong magic number',
            ),
            "damaged or cut short",
        ),
        (
            dali(
                "CPU operator `nvidia.dali.fn.readers.mxnet`",
                'Assert on "current_file_index_ + 1 < paths_.size()" failed: Incomplete or corrupted record files',
            ),
            "damaged or cut short",
        ),
    ],
)
def test_known_error(text: str, cause: str) -> None:
    known = explain(f"Traceback (most recent call last):\n  File 'x'\n{text}\n")
    assert known is not None
    assert cause in known.cause


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (jpeg(1)[:200], "does not say which record"),
        (b"no image at all", "does not say which record"),
        (b"", "does not say which record"),
        (None, "damaged or cut short"),
    ],
    ids=["half a JPEG", "text", "nothing", "half a file"],
)
def test_what_the_installed_dali_says_is_known(payload: bytes | None, cause: str, tmp_path: Path) -> None:
    from nvidia.dali import Pipeline, fn

    rec = tmp_path / "pairs.rec"
    with RecordWriter(rec, sync=False) as writer:
        for ordinal in range(4):
            image = jpeg(ordinal) if payload is None or ordinal != 2 else payload
            writer.write(pack_record(Record([1.0], image, ordinal)))
    if payload is None:
        rec.write_bytes(rec.read_bytes()[:-100])
    pipe = Pipeline(batch_size=4, num_threads=1, device_id=None)
    with pipe:
        jpegs, labels = fn.readers.mxnet(path=[str(rec)], index_path=[str(rec.with_suffix(".idx"))])
        pipe.set_outputs(fn.decoders.image(jpegs, device="cpu"), labels)
    pipe.build()
    with pytest.raises(RuntimeError) as caught:
        pipe.run()
    known = explain(str(caught.value))
    assert known is not None
    assert cause in known.cause


def test_unknown_error_is_left_alone() -> None:
    assert explain("ValueError: the captions are of different lengths") is None


def test_every_explanation_is_two_lines() -> None:
    for known in KNOWN_ERRORS:
        assert known.cause
        assert known.cure
        assert "\n" not in known.cause + known.cure
        assert max(len(known.cause), len(known.cure)) < 120
