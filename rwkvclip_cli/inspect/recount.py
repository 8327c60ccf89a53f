"""What a set's records add up to, counted anew beside what its manifest says.

>>> recount = Recount(read_beside(locate("pairs.rec")), sizes_as_packed=True)
>>> for checked in check_records(beside, prover, log): recount.add(checked)
>>> list(recount.faults())
[]

The records alone do not tell how many captions there were: a sample of fewer than the slots repeats them. So the mean
of their tokens is compared where all of a record differ; the least and the greatest always.
"""

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rwkvclip_cli.data.packing.tally import Spread
from rwkvclip_cli.data.packing.worker import token_counts
from rwkvclip_cli.data.shards import beside as path_beside
from rwkvclip_cli.documents import parse_json
from rwkvclip_cli.inspect.check import Checked
from rwkvclip_cli.inspect.faults import Fault
from rwkvclip_cli.inspect.files import Beside


class Recount:
    """Counts the records of a whole set. sizes_as_packed: images are proved as pack has proved them.

    What some record does not tell, because it is damaged or a list has no line of it, is not compared.
    """

    def __init__(self, beside: Beside, *, sizes_as_packed: bool) -> None:
        self._beside = beside
        self._count = 0
        self._kept: Counter[str] = Counter()
        self._sizes_as_packed = sizes_as_packed
        self._image_bytes, self._widths, self._heights = Spread(), Spread(), Spread()
        self._tokens = Spread()
        self._are_captions_plain = True

    def add(self, checked: Checked) -> None:
        """Count a record that nothing is wrong with; its labels are as many as the manifest says."""
        if checked.record is None or checked.faults:
            return
        self._count += 1
        labels, step = array("f", checked.record.labels), self._beside.context_length
        self._image_bytes.add(len(checked.record.image))
        if checked.origin is not None:
            self._kept[checked.origin.kept] += 1
        if checked.size is not None:
            self._widths.add(checked.size[0])
            self._heights.add(checked.size[1])
        for tokens in token_counts(labels, self._beside.captions, step):
            self._tokens.add(tokens)
        slots = {labels[start : start + step].tobytes() for start in range(0, len(labels), step or 1)}
        self._are_captions_plain &= len(slots) == self._beside.captions

    def faults(self) -> Iterator[Fault]:
        """What the manifest says that is not so; nothing where it is of more records than were counted, or fewer."""
        manifest = self._beside.manifest
        if manifest.get("count") != self._count:
            return
        for name, here in self._manifest_facts():
            if name in manifest and manifest[name] != here:
                yield Fault("manifest", f"its {name} is {_shown(manifest[name])}, not {_shown(here)}")
        said = manifest.get("statistics")
        if not isinstance(said, dict):
            return
        for name, here in self._statistics():
            if name in said and not _agrees(said[name], here):
                yield Fault("manifest", f"its statistics say {name} {_shown(said[name])}, not {_shown(here)}")

    def _manifest_facts(self) -> Iterator[tuple[str, Any]]:
        yield "size_bytes", self._beside.size_bytes
        if (reasons := self._reasons()) is not None:
            yield "rejects", reasons.total()

    def _statistics(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each of the manifest's statistics that the files tell, as far as they tell it."""
        if self._kept.total() == self._count:
            yield "kept", dict(sorted(self._kept.items()))
        if (reasons := self._reasons()) is not None:
            yield "rejected", dict(sorted(reasons.items()))
        yield "image_bytes", self._image_bytes.statistics()
        if self._sizes_as_packed and self._widths.count == self._count:
            yield "image_width", self._widths.statistics()
            yield "image_height", self._heights.statistics()
        tokens = self._tokens.statistics()
        if not self._are_captions_plain:
            del tokens["mean"]
        yield "caption_tokens", tokens

    def _reasons(self) -> Counter[str] | None:
        """How many rejects for each reason; None where the list of them is not there, or damaged."""
        path = path_beside(self._beside.files.rec, "rejects")
        if not path.is_file():
            return None
        try:
            with path.open(encoding="utf-8", newline="\n") as lines:
                return Counter(str(parse_json(line)["reason"]) for line in lines)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _agrees(said: object, here: dict[str, Any]) -> bool:
    """Whether what is said has all that is here and, where that is the whole, no more."""
    if not isinstance(said, dict):
        return False
    return {name: said.get(name) for name in here} == here if "min" in here else said == here


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:120]
