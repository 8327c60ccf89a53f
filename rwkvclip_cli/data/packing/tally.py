"""What the records and rejects of a pack add up to, so far and, from a checkpoint, further on.

>>> tally.add(packed)
>>> tally.statistics()["captions_truncated"]
0
"""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rwkvclip_cli.data.packing.samples import Reject
from rwkvclip_cli.data.packing.worker import Packed

SHOWN_REJECTS = 3


@dataclass
class Spread:
    """Least, mean and greatest of numbers seen one at a time."""

    count: int = 0
    total: int = 0
    least: int = 0
    greatest: int = 0

    def add(self, value: int) -> None:
        """Take in one number."""
        if not self.count:
            self.least = self.greatest = value
        elif value < self.least:
            self.least = value
        elif value > self.greatest:
            self.greatest = value
        self.count += 1
        self.total += value

    def statistics(self) -> dict[str, float]:
        """The three, for the manifest."""
        mean = round(self.total / self.count, 3) if self.count else 0.0
        return {"min": self.least, "mean": mean, "max": self.greatest}


@dataclass
class Tally:
    """What the records and rejects so far add up to.

    dedupe: whether repeated images are looked for. samples: how many of the inputs a list of the samples counts.
    kept: how many records for each way of keeping an image. reasons: how many rejects for each reason. messages: what
    the first few rejects said.
    """

    dedupe: bool = False
    count: int = 0
    samples: int = 0
    ignored: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    tokens: Spread = field(default_factory=Spread)
    captions: Spread = field(default_factory=Spread)
    widths: Spread = field(default_factory=Spread)
    heights: Spread = field(default_factory=Spread)
    image_bytes: Spread = field(default_factory=Spread)
    truncated: int = 0
    dropped: int = 0
    unmarked: int = 0
    blank: int = 0
    repeated: int = 0

    def add(self, record: Packed) -> None:
        """Count a record."""
        self.count += 1
        self.samples += 1
        self.kept[record.kept] += 1
        self.formats[record.format] += 1
        for tokens in record.token_counts:
            self.tokens.add(tokens)
        self.captions.add(len(record.token_counts) + record.dropped)
        self.widths.add(record.width)
        self.heights.add(record.height)
        self.image_bytes.add(len(record.jpeg))
        self.truncated += record.truncated
        self.dropped += record.dropped
        self.unmarked += record.unmarked
        self.blank += record.blank

    def refuse(self, reject: Reject) -> None:
        """Count a reject."""
        self.samples += reject.is_sample
        self.reasons[reject.reason] += 1
        if len(self.messages) < SHOWN_REJECTS:
            self.messages.append(reject.message)

    @property
    def rejects(self) -> int:
        """How many rejects there are."""
        return self.reasons.total()

    def statistics(self) -> dict[str, Any]:
        """All of it, for the manifest."""
        return {
            "kept": dict(sorted(self.kept.items())),
            "rejected": dict(sorted(self.reasons.items())),
            "ignored_files": self.ignored,
            "captions_a_record": self.captions.statistics(),
            "caption_tokens": self.tokens.statistics(),
            "captions_truncated": self.truncated,
            "captions_dropped": self.dropped,
            "captions_blank": self.blank,
            "captions_repeated": self.repeated,
            "token_slots_unmarked": self.unmarked,
            "image_format": dict(sorted(self.formats.items())),
            "images_repeated": self.reasons["duplicate"] if self.dedupe else None,
            "image_width": self.widths.statistics(),
            "image_height": self.heights.statistics(),
            "image_bytes": self.image_bytes.statistics(),
        }

    def document(self) -> dict[str, Any]:
        """All of it, for `restored`."""
        plain: dict[type, Callable[[Any], Any]] = {Spread: asdict, Counter: dict}
        return {name: plain.get(type(value), deepcopy)(value) for name, value in vars(self).items()}

    @classmethod
    def restored(cls, document: dict[str, Any]) -> Self:
        """The tally whose `document` that is."""
        tally = cls()
        for name, value in document.items():
            kind = type(getattr(tally, name))
            setattr(tally, name, Spread(**value) if kind is Spread else kind(value))
        return tally
