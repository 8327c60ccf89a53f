"""Who is to blame, and the exit code, from what the ranks wrote and what torchrun saw."""

import signal
import socket

import pytest

from rwkvclip_cli.launch.exit_record import ExitRecord
from rwkvclip_cli.launch.torchrun_log import Failure
from rwkvclip_cli.launch.verdict import Stop, Verdict, blame, judge

HERE = socket.gethostname()
STOP = Stop(signal.SIGTERM, 300)


def record(rank: int, code: int, message: str = "", traceback: str = "", hint: str = "") -> ExitRecord:
    return ExitRecord(code, message, hint, traceback, rank, "node0", float(rank), 0)


def test_done() -> None:
    assert judge([], [], 0, None) == Verdict(0)


@pytest.mark.parametrize("stop", [None, STOP])
def test_a_failure_does_not_count_where_torchrun_ended_well(stop: Stop | None) -> None:
    assert judge([record(1, 1, "disk full")], [], 0, stop) == Verdict(0)


def test_why_an_attempt_failed() -> None:
    records = [record(0, 1), record(1, 3, "disk full", hint="df -h")]
    assert blame(records, "") == Verdict(3, "rank 1 on node0: disk full", "", "df -h")
    assert blame([], "Traceback ...") == Verdict(1, "a rank has failed and left no word why", "Traceback ...")


def test_rank_0_has_told_itself_that_everything_is_saved() -> None:
    elsewhere = judge([record(8, 75), record(9, 75)], [], 0, STOP)
    assert elsewhere == Verdict(75, "stopped on request, everything saved", hint="the same command continues")
    assert judge([record(0, 75), record(1, 75)], [], 0, STOP) == Verdict(75, "the same command continues")


def test_the_earliest_record_is_the_cause() -> None:
    records = [record(2, 3, "disk full", hint="df -h"), record(0, 1, "connection lost")]
    verdict = judge(records, [Failure(0, 1), Failure(2, 3)], 1, None)
    assert verdict == Verdict(3, "rank 2 on node0: disk full", "", "df -h")


def test_a_record_that_says_why_comes_before_one_that_only_fails() -> None:
    verdict = judge([record(1, 1), record(0, 1, "wrong element")], [], 1, None)
    assert verdict.message == "rank 0 on node0: wrong element"


LOST = "RuntimeError: Read error [10.0.0.2]:4021: Connection reset by peer"


def test_who_lost_a_peer_is_the_poorest_witness() -> None:
    lost = record(0, 1, LOST)
    assert judge([lost, record(1, 3, "disk full")], [], 1, None).message == "rank 1 on node0: disk full"
    assert judge([lost, record(1, 7)], [], 1, None).message == "rank 1 on node0 failed with exit code 7"
    silent = judge([lost], [Failure(0, 1), Failure(1, 9)], 1, None)
    assert silent == Verdict(9, f"rank 1 on {HERE} failed with exit code 9")


@pytest.mark.parametrize(
    ("records", "failures", "elsewhere"),
    [
        ([record(0, 1, LOST)], [], True),
        ([record(0, 1, "disk full")], [], False),
        ([], [Failure(0, -signal.SIGKILL)], False),
        ([], [Failure(0, -signal.SIGABRT)], True),  # as torch and NCCL end on losing a peer
        ([], [Failure(0, -signal.SIGTERM)], True),  # as torchrun ends ranks
    ],
)
def test_what_follows_from_another_node_is_told_apart(
    records: list[ExitRecord], failures: list[Failure], elsewhere: bool
) -> None:
    assert judge(records, failures, 1, None).elsewhere is elsewhere


def test_calls_in_cpp_are_left_out() -> None:
    stack = (
        "DistNetworkError: got 0 bytes\nException raised from recv at a.hpp:7 (most recent call first):\nframe #0: c"
    )
    verdict = judge([record(0, 1, stack, f"Traceback ...\n{stack}")], [], 1, None)
    assert verdict.message == "rank 0 on node0: DistNetworkError: got 0 bytes"
    assert verdict.traceback == "Traceback ...\nDistNetworkError: got 0 bytes"


def test_a_signal_outweighs_the_records_of_those_who_lost_their_peer() -> None:
    lost = record(0, 1, "RuntimeError: Connection closed by peer")
    verdict = judge([lost], [Failure(0, 1), Failure(1, -signal.SIGSEGV), Failure(2, -signal.SIGTERM)], 1, None)
    assert verdict == Verdict(128 + signal.SIGSEGV, f"rank 1 on {HERE} was ended by SIGSEGV")


def test_abort_is_blamed_after_other_signals() -> None:
    failures = [Failure(0, -signal.SIGABRT), Failure(1, -signal.SIGKILL)]
    verdict = judge([], failures, 1, None)
    assert verdict.exit_code == 128 + signal.SIGKILL
    assert "out-of-memory" in verdict.hint


def test_a_rank_that_recorded_and_then_aborted_is_judged_by_its_record() -> None:
    verdict = judge([record(0, 75), record(1, 75)], [Failure(1, -signal.SIGABRT)], 1, STOP)
    assert verdict.exit_code == 75


def test_exit_code_alone() -> None:
    verdict = judge([], [Failure(1, 9)], 1, None, "Traceback ...")
    assert verdict == Verdict(9, f"rank 1 on {HERE} failed with exit code 9", "Traceback ...")


def test_known_errors_get_cause_and_cure() -> None:
    bug = record(0, 1, "RuntimeError: CUDA error: invalid device ordinal", traceback="Traceback ...")
    verdict = judge([bug], [], 1, None)
    assert verdict.message.splitlines()[1] == "  cause: a rank asks for a GPU that this process cannot see"
    assert verdict.hint.startswith("lower --gpus")
    assert verdict.traceback == "Traceback ..."


@pytest.mark.parametrize(
    ("records", "failures", "torchrun_code", "stop", "expected"),
    [
        ([record(0, 75), record(1, 75)], [], 0, STOP, 75),
        ([record(0, 75), record(1, 75)], [], 0, None, 75),  # another node was asked to stop
        ([record(0, 75), record(1, 1, "disk full")], [Failure(1, 1)], 1, STOP, 1),
        ([], [Failure(0, -signal.SIGTERM), Failure(1, -signal.SIGTERM)], 1, STOP, 143),
        ([], [Failure(0, -signal.SIGUSR1)], 1, Stop(signal.SIGUSR1, 300), 128 + signal.SIGUSR1),
        ([], [Failure(0, -signal.SIGSEGV)], 1, STOP, 128 + signal.SIGSEGV),
        ([], [], -signal.SIGTERM, STOP, 75),  # before any rank
        ([], [], 0, STOP, 0),  # the request came after the end
        ([record(0, 130, "interrupted")], [], 1, Stop(signal.SIGINT, 300), 130),
        ([record(0, 75)], [], -signal.SIGKILL, Stop(signal.SIGTERM, 300, (1,)), 143),
        ([], [Failure(0, -signal.SIGTERM)], 1, None, 143),  # somebody else's SIGTERM
        ([], [], -signal.SIGKILL, None, 137),
    ],
)
def test_exit_codes(
    records: list[ExitRecord], failures: list[Failure], torchrun_code: int, stop: Stop | None, expected: int
) -> None:
    assert judge(records, failures, torchrun_code, stop).exit_code == expected


def test_torchruns_own_failure_keeps_its_traceback_unless_it_is_known() -> None:
    unknown = judge([], [], 1, None, "Traceback ...\nTypeError: a bug")
    assert (unknown.exit_code, unknown.message) == (1, "torchrun failed before any rank did: TypeError: a bug")
    assert unknown.traceback == "Traceback ...\nTypeError: a bug"
    known = judge([], [], 1, None, "Traceback ...\nRendezvousTimeoutError")
    assert known.traceback == ""
    assert "cause: not every node joined in time" in known.message


def test_nodes_that_did_not_meet_are_told_with_the_place() -> None:
    traceback = "Traceback ...\nDistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined."
    verdict = judge([], [], 1, None, traceback, "2 nodes at 10.0.0.1:29500")
    assert verdict.message.splitlines()[0] == (
        "torchrun failed before 2 nodes at 10.0.0.1:29500 had met: "
        "DistStoreError: Timed out after 11 seconds waiting for clients. 1/2 clients joined."
    )
    assert not verdict.elsewhere
