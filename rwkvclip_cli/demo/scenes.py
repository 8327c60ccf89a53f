"""Captioned scenes, drawn as needed: the demo's data, split so that no held-out scene occurs in training.

>>> write_scenes(Path("scenes"), 1000, seed=0, held_out=False)

A scene is a combination of attributes: one to four figures, each a thing of a colour and a size, how they stand to each
other, and a background of a colour and a pattern. Three captions tell it in different words. Left and right mean
nothing here, because training mirrors images.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.demo.drawing import COLORS, PATTERNS, SIZES, THINGS, draw

JPEG_QUALITY = 90
HELD_OUT_SHARE = 8  # one combination in eight is kept from training

LAYOUTS = {"alone": 0.15, "group": 0.15, "beside": 0.25, "stacked": 0.45}  # with their shares
# Of every list of words the first is the plain one, for the first caption; the others serve the paraphrases.
COLOR_WORDS = {
    "red": ("red", "crimson"),
    "yellow": ("yellow", "golden"),
    "turquoise": ("turquoise", "teal"),
    "purple": ("purple", "violet"),
    "pink": ("pink", "rose"),
    "gray": ("gray", "grey"),
}
THING_WORDS = {
    "circle": ("circle", "disc"),
    "square": ("square", "box"),
    "ring": ("ring", "hoop"),
    "cross": ("cross", "plus sign"),
    "moon": ("moon", "crescent"),
    "house": ("house", "cottage"),
    "tree": ("tree", "fir"),
    "cup": ("cup", "mug"),
    "boat": ("boat", "sailboat"),
    "flower": ("flower", "blossom"),
}
PLURALS = {"box": "boxes", "cross": "crosses", "fish": "fish"}
SIZE_WORDS = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
NUMBER_WORDS = {2: ("two", "a pair of"), 3: ("three", "a trio of"), 4: ("four", "a group of four")}
PATTERN_WORDS = {
    "plain": ("plain {}", "solid {}"),
    "striped": ("striped {}", "{} with stripes"),
    "dotted": ("dotted {}", "{} with dots"),
    "checked": ("checked {}", "{} with checks"),
}


@dataclass(frozen=True)
class Relations:
    """Words between two figures: the first above, below or beside the second."""

    above: tuple[str, ...]
    below: tuple[str, ...]
    beside: tuple[str, ...]


PLAIN_RELATIONS = Relations(("above", "over"), ("below", "under"), ("next to", "beside"))
PROSE_RELATIONS = Relations(
    ("floats above", "hovers over"), ("lies below", "rests under"), ("stands next to", "sits beside")
)


@dataclass(frozen=True, order=True)
class Figure:
    """What can be said of one figure: one each of THINGS, COLORS and SIZES."""

    thing: str
    color: str
    size: str


@dataclass(frozen=True)
class Scene:
    """A combination of attributes; a scene and its mirror image are equal.

    `figures` runs from top to bottom where they are stacked, and is sorted where they stand side by side; a group
    shows its one figure `number` times.
    """

    layout: str
    figures: tuple[Figure, ...]
    number: int
    ground: str
    pattern: str

    def is_held_out(self) -> bool:
        """Whether the scene belongs to the held-out part: a matter of its attributes alone, not of any seed."""
        words = [self.layout, str(self.number), self.ground, self.pattern]
        words += [word for figure in self.figures for word in (figure.size, figure.color, figure.thing)]
        digest = hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def write_scenes(folder: Path, count: int, *, seed: int, held_out: bool) -> None:
    """Write `count` scenes as 00000.jpg with 00000.txt (three captions, one a line), and so on.

    No two of them are the same combination or share their first caption, and no combination of one part (`held_out`)
    is ever in the other. The same arguments give the same bytes, and a smaller count the first of them.

    Raises UsageError where `folder` holds anything, which would be packed with the scenes, or `count` is below 1.
    """
    if count < 1:
        raise UsageError(f"the number of scenes must be at least 1; got {count}")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: scenes need a folder of their own", hint=f"rm -r {folder}")
    for ordinal, (scene, captions) in enumerate(captioned_scenes(count, seed=seed, held_out=held_out)):
        image = draw(
            scene.layout,
            [(figure.thing, figure.color, figure.size) for figure in scene.figures],
            scene.number,
            (scene.ground, scene.pattern),
            random.Random(f"drawing {seed} {held_out} {ordinal}"),
        )
        image.save(folder / f"{ordinal:05}.jpg", quality=JPEG_QUALITY)
        (folder / f"{ordinal:05}.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")


def captioned_scenes(count: int, *, seed: int, held_out: bool) -> Iterator[tuple[Scene, tuple[str, str, str]]]:
    """Yield `count` different scenes of one part, each with its three captions."""
    rng = random.Random(f"scenes {seed} {held_out}")
    seen: set[Scene | str] = set()
    while count > 0:
        scene = random_scene(rng)
        captions = describe(scene, rng)
        if scene.is_held_out() == held_out and seen.isdisjoint((scene, captions[0])):
            seen |= {scene, captions[0]}
            count -= 1
            yield scene, captions


def random_scene(rng: random.Random) -> Scene:
    """Draw a combination; the background and the figures all differ in colour."""
    layout = rng.choices(list(LAYOUTS), list(LAYOUTS.values()))[0]
    ground, *colors = rng.sample(list(COLORS), 3)
    figures = tuple(Figure(rng.choice(list(THINGS)), color, rng.choice(list(SIZES))) for color in colors)
    if layout in ("alone", "group"):
        figures = figures[:1]
    elif layout == "beside":
        figures = tuple(sorted(figures))
    number = rng.choice(list(NUMBER_WORDS)) if layout == "group" else len(figures)
    return Scene(layout, figures, number, ground, rng.choice(PATTERNS))


def describe(scene: Scene, rng: random.Random) -> tuple[str, str, str]:
    """Three captions, each telling the whole scene: in plain words, as a captioner and as a rewriter would."""
    plain = _subject(scene, PLAIN_RELATIONS, lambda words: words[0], rng)
    caption = _subject(scene, PLAIN_RELATIONS, rng.choice, rng)
    prose = _subject(scene, PROSE_RELATIONS, rng.choice, rng)
    ground, backdrop = _ground(scene, "background", rng), _ground(scene, "backdrop", rng)
    found = "" if len(scene.figures) == 2 else "we see "
    return (
        f"{plain}, {scene.pattern} {scene.ground} background",
        rng.choice((f"a picture of {caption} on {ground}", f"{caption} on {ground}", f"{ground}, on it {caption}")),
        rng.choice((f"{_capital(prose)} against {backdrop}.", f"Against {backdrop} {found}{prose}.")),
    )


def _subject(scene: Scene, relations: Relations, pick: Callable[[Sequence[str]], str], rng: random.Random) -> str:
    """Everything but the background: `a small red star above a large blue ring`, or the other way round."""
    if scene.layout == "group":
        return f"{pick(NUMBER_WORDS[scene.number])} {_name(scene.figures[0], pick, plural=True)}"
    names = [f"a {_name(figure, pick)}" for figure in scene.figures]
    if scene.layout == "alone":
        return names[0]
    turned = rng.random() < 0.5
    vertical = relations.below if turned else relations.above
    joint = pick(relations.beside if scene.layout == "beside" else vertical)
    first, second = reversed(names) if turned else names
    return f"{first} {joint} {second}"


def _name(figure: Figure, pick: Callable[[Sequence[str]], str], plural: bool = False) -> str:
    thing = pick(THING_WORDS.get(figure.thing, (figure.thing,)))
    if plural:
        thing = PLURALS.get(thing, f"{thing}s")
    color = pick(COLOR_WORDS.get(figure.color, (figure.color,)))
    return f"{pick(SIZE_WORDS[figure.size])} {color} {thing}"


def _ground(scene: Scene, noun: str, rng: random.Random) -> str:
    color = rng.choice(COLOR_WORDS.get(scene.ground, (scene.ground,)))
    words = rng.choice(PATTERN_WORDS[scene.pattern]).format(f"{color} {noun}")
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
