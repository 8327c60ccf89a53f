"""Worker processes: order, bounded reading ahead, and what becomes of those that die."""

from collections.abc import Iterator

import pytest
from pack_files import photo

from rwkvclip_cli.console import RwkvClipError
from rwkvclip_cli.data.packing import nursery, pool
from rwkvclip_cli.data.packing.pool import Pool
from rwkvclip_cli.data.packing.samples import Ignored, Reject, Sample
from rwkvclip_cli.data.packing.worker import Packed, WorkerOptions

# What a worker's process runs instead, before it serves: a decoder that the bytes "POISON" kill.
POISONED = """
import os, sys
sys.path[:] = {path!r}
import rwkvclip_cli.data.packing.worker as worker
prepare = worker.prepare
def poisoned(pictures, *arguments):
    if any(b"POISON" in picture for picture in pictures):
        {deed}
    return prepare(pictures, *arguments)
worker.prepare = poisoned
from rwkvclip_cli.data.packing.nursery import main
main({descriptor}, {proof!r})
"""


def samples(count: int, bad: tuple[int, ...] = ()) -> list[Sample]:
    pictures = [photo(number) + (b"POISON" if number in bad else b"") for number in range(count)]
    return [Sample(f"s{number}", picture, (f"caption {number}",)) for number, picture in enumerate(pictures)]


def test_a_sample_that_kills_its_worker_is_a_reject_and_the_rest_are_records(monkeypatch):
    monkeypatch.setattr(nursery, "START", POISONED.replace("{deed}", "os.kill(os.getpid(), 9)"))
    with Pool(2, WorkerOptions()) as workers:
        outcomes = list(workers.run([*samples(12, bad=(5,)), Ignored("x"), *samples(2)]))
    assert isinstance(outcomes[12], Ignored)
    crashed = outcomes[5]
    assert isinstance(crashed, Reject)
    assert (crashed.source, crashed.reason) == ("s5", "decoder-crash")
    assert "signal 9" in crashed.message
    good = [outcome for outcome in outcomes if isinstance(outcome, Packed)]
    assert [outcome.source for outcome in good] == [f"s{n}" for n in (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 0, 1)]


def test_a_bug_at_one_sample_costs_that_one_alone_and_shows_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(nursery, "START", POISONED.replace("{deed}", "raise KeyError('a bug')"))
    with Pool(1, WorkerOptions()) as workers:
        outcomes = list(workers.run(samples(3, bad=(1,))))
    assert [type(outcome) for outcome in outcomes] == [Packed, Reject, Packed]
    assert (outcomes[1].source, outcomes[1].reason) == ("s1", "internal-error")
    assert outcomes[1].message == "s1: KeyError: 'a bug'"
    said = capsys.readouterr().err
    assert said.count("Traceback") == 1
    assert "in poisoned" in said


def test_a_worker_killed_while_it_starts_is_started_again(monkeypatch, tmp_path):
    mark = tmp_path / "killed"
    once = (
        f"import os; p = {str(mark)!r}\nif not os.path.exists(p):\n    open(p, 'w').close(); os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setattr(nursery, "START", once.replace("{", "{{").replace("}", "}}") + nursery.START)
    with Pool(1, WorkerOptions()) as workers:
        outcomes = list(workers.run(samples(2)))
    assert mark.exists()
    assert [type(outcome) for outcome in outcomes] == [Packed, Packed]


def test_a_worker_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(nursery, "START", "import no_such_module_{descriptor}, {proof}, sys; sys.path[:] = {path!r}")
    said = r"(?s)5 packing processes did not start \(last exit code 1\).*no_such_module"
    with Pool(1, WorkerOptions()) as workers, pytest.raises(RwkvClipError, match=said):
        list(workers.run(samples(1)))


def test_the_pool_reads_only_a_little_ahead(monkeypatch):
    monkeypatch.setattr(pool, "BATCH_SAMPLES", 1)
    read = 0

    def counting() -> Iterator[Sample]:
        nonlocal read
        for sample in samples(20):
            read += 1
            yield sample

    with Pool(1, WorkerOptions()) as workers:
        for number, _ in enumerate(workers.run(counting()), 1):
            assert read <= number + 4
