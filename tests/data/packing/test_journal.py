"""A journal is read as it was written, or not at all."""

from pathlib import Path

from rwkvclip_cli.data.packing.growing import Extent
from rwkvclip_cli.data.packing.journal import JOURNAL, READING, Journal, read_journal, write_journal
from rwkvclip_cli.data.packing.reading import Position
from rwkvclip_cli.data.packing.record_files import PairExtent
from rwkvclip_cli.data.packing.tally import Tally

WRITTEN = Journal(
    {"version": "1", "options": {"out": "caf\udce9"}, "files": []},
    READING,
    Position(1, 2, 3),
    [PairExtent(4, Extent(5, "ab"), Extent(6, "cd"))],
    {"o.sources.tsv": Extent(7, "ef")},
    Tally().document(),
)


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_journal(tmp_path) is None
    write_journal(tmp_path, WRITTEN)
    assert read_journal(tmp_path) == WRITTEN


def test_a_journal_with_any_byte_changed_or_missing_is_none(tmp_path: Path) -> None:
    write_journal(tmp_path, WRITTEN)
    path = tmp_path / JOURNAL
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            assert read_journal(tmp_path) is None, damaged
