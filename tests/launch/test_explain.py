"""Errors as torch, gloo and NCCL word them get the right cause."""

import pytest

from rwkvclip_cli.launch.explain import KNOWN_ERRORS, explain


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
        (
            "torch.distributed.DistStoreError: Timed out after 6 seconds waiting for clients. 1/2 clients joined.",
            "joined in time",
        ),
        (
            "RuntimeError: Gloo connectFullMesh failed with connect [127.0.1.1]:43211: Connection refused",
            "loopback address",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.27.5 ncclSystemError: System call failed",
            "inside NCCL failed",
        ),
        ("gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4021", "another rank ended first"),
        ("torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection", "does not answer"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "does not hold"),
    ],
)
def test_known_error(text: str, cause: str) -> None:
    known = explain(f"Traceback (most recent call last):\n  File 'x'\n{text}\n")
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
