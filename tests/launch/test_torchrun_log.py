"""What torchrun writes is passed on, held back, and understood, however it arrives in pieces."""

import pytest

from rwkvclip_cli.launch.torchrun_log import Failure, TorchrunLog, without_stacks

# As torch 2.13 writes it when rank 1 is killed and rank 0 ended for it; the stack of calls is cut short.
REPORT = """\
W1201 12:49:35.647000 8426 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 8455 closing signal \
SIGTERM
E1201 12:49:35.649000 8426 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 \
(pid: 8456) of binary: /opt/py/bin/python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/opt/py/lib/torch/distributed/launcher/api.py", line 388, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
rwkvclip_cli FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-12-01_12:49:35
  host      : node0
  rank      : 4 (local_rank: 0)
  exitcode  : -15 (pid: 8455)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 8455
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-12-01_12:49:35
  host      : node0
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 8456)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 8456
============================================================
"""
WORKER_TRACEBACK = """\
Traceback (most recent call last):
  File "worker.py", line 19, in <module>
    raise ValueError("raw bug")
ValueError: raw bug
"""


@pytest.mark.parametrize("piece", [1, 7, 100, 100_000])
def test_report_is_held_back_and_read(piece: int) -> None:
    log = TorchrunLog()
    data = f"progress 1\n{REPORT}".encode()
    shown = b"".join(log.feed(data[start : start + piece]) for start in range(0, len(data), piece))
    assert shown + log.finish() == b"progress 1\n"
    assert log.failures() == [Failure(rank=5, exit_code=-9), Failure(rank=4, exit_code=-15)]
    assert log.tracebacks() == ""


def test_a_restart_lets_lines_pass_again_and_keeps_the_report() -> None:
    log = TorchrunLog()
    assert log.feed(f"progress 1\n{WORKER_TRACEBACK}".encode()) == b"progress 1\n"
    log.forget_tracebacks()
    assert log.tracebacks() == ""
    assert log.feed(b"progress 2\n") == b"progress 2\n"
    assert log.feed(f"{WORKER_TRACEBACK}{REPORT}".encode()) == b""
    log.forget_tracebacks()
    assert log.tracebacks() == ""
    assert log.failures() == [Failure(rank=5, exit_code=-9), Failure(rank=4, exit_code=-15)]


def test_a_workers_traceback_is_kept_for_the_end() -> None:
    log = TorchrunLog()
    assert log.feed((WORKER_TRACEBACK + REPORT).encode()) == b""
    assert log.tracebacks() == WORKER_TRACEBACK.rstrip()
    assert [failure.rank for failure in log.failures()] == [5, 4]


def test_torchruns_own_failure_is_kept_for_the_end() -> None:
    log = TorchrunLog()
    log.feed(b"W1201 joining\nTraceback (most recent call last):\n  File 'x'\nRendezvousTimeoutError\n")
    assert log.tracebacks() == "Traceback (most recent call last):\n  File 'x'\nRendezvousTimeoutError"
    assert log.failures() == []


def test_ordinary_lines_pass_at_once_and_bytes_stay_as_they_are() -> None:
    log = TorchrunLog()
    assert log.feed(b"W1201 waiting for nodes\nloss \xff 3.2") == b"W1201 waiting for nodes\n"
    assert log.finish() == b"loss \xff 3.2\n"
    assert log.finish() == b""


STACK = """\
[W1201 13:34:11 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=4): Failed to recv, got 0 bytes.
Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f341bf46b8d in /opt/py/lib/libc10.so)
<omitting python frames>
frame #34: _start + 0x21 (0x56222891a081 in /opt/py/bin/python)

W1201 13:34:11 dynamic_rendezvous.py:1298] The node has failed to shutdown the rendezvous

frame #1 of 10 is a frame of a film
"""


def test_calls_in_cpp_are_left_out_and_nothing_else() -> None:
    first, last, empty, film = STACK.splitlines()[0], *STACK.splitlines()[-3:]
    expected = f"{first}\n{last}\n{empty}\n{film}\n"
    assert TorchrunLog().feed(STACK.encode()).decode() == expected
    assert without_stacks(STACK) == expected
    assert without_stacks("RuntimeError: no stack") == "RuntimeError: no stack"
