"""Draw the demo's scenes with Pillow: sixteen things, twelve colours, four patterns, no two drawings alike.

>>> draw("alone", [("star", "red", "large")], 1, ("blue", "dotted"), random.Random(0)).size
(80, 80)

Things are polygons in a square from -1 to 1 (y downwards), so that every one can turn, grow and take any colour.
"""

import functools
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

Color = tuple[int, int, int]
Point = tuple[float, float]
Polygon = tuple[Point, ...]
Part = tuple[str, Polygon]  # a tone of TONES, and where it goes

SIDE = 80  # pixels of the finished image
OVERSAMPLING = 2  # drawn larger by this and averaged, for smooth edges

COLORS: dict[str, Color] = {
    "red": (214, 40, 40),
    "orange": (245, 138, 24),
    "yellow": (246, 217, 45),
    "green": (56, 158, 68),
    "turquoise": (58, 200, 190),
    "blue": (42, 92, 210),
    "purple": (126, 54, 168),
    "pink": (245, 140, 180),
    "brown": (122, 78, 44),
    "black": (26, 26, 28),
    "gray": (138, 140, 144),
    "white": (244, 244, 242),
}
COLOR_SPREAD = 14  # the most that a channel strays from its colour
THINGS = (
    "circle",
    "square",
    "triangle",
    "star",
    "ring",
    "cross",
    "heart",
    "diamond",
    "moon",
    "house",
    "tree",
    "fish",
    "cup",
    "boat",
    "flower",
    "mushroom",
)
PATTERNS = ("plain", "striped", "dotted", "checked")
SIZES = {"small": 0.65, "large": 1.0}  # shares of a place's radius
# Share of white (above 0) or black (below 0) mixed into a colour: figures' details, the background's pattern.
TONES = {"main": 0.0, "dark": -0.4, "light": 0.6}
PATTERN_TONE = 0.35
# Where figures stand: (x, y, radius) in shares of the side. All keep inside the evaluation's centre crop of 7/8.
PLACES: dict[tuple[str, int], tuple[tuple[float, float, float], ...]] = {
    ("alone", 1): ((0.5, 0.5, 0.29),),
    ("stacked", 2): ((0.5, 0.315, 0.18), (0.5, 0.685, 0.18)),
    ("beside", 2): ((0.315, 0.5, 0.18), (0.685, 0.5, 0.18)),
    ("group", 2): ((0.32, 0.5, 0.17), (0.68, 0.5, 0.17)),
    ("group", 3): ((0.5, 0.31, 0.16), (0.31, 0.67, 0.16), (0.69, 0.67, 0.16)),
    ("group", 4): ((0.31, 0.31, 0.16), (0.69, 0.31, 0.16), (0.31, 0.69, 0.16), (0.69, 0.69, 0.16)),
}
SWAY = 0.03  # the most that a figure strays from its place, in shares of the side
TURN = math.radians(14)  # the most that it turns
GROWTH = 0.1  # the most that its size strays


def draw(
    layout: str,
    figures: Sequence[tuple[str, str, str]],
    number: int,
    background: tuple[str, str],
    rng: random.Random,
) -> "Image.Image":
    """Draw a scene.

    Args:
        layout: alone, group, beside or stacked; with `number` it names the places (see PLACES).
        figures: (thing, colour, size) of each, from top to bottom where stacked; one serves for a whole group.
        background: colour and pattern.
        rng: shades, places, angles, and which side is left.

    Returns:
        (SIDE, SIDE) pixels, RGB.
    """
    from PIL import Image, ImageDraw

    side = SIDE * OVERSAMPLING
    ground, pattern = background
    base = _shade(COLORS[ground], rng)
    image = Image.new("RGB", (side, side), base)
    canvas = ImageDraw.Draw(image)
    _draw_pattern(canvas, pattern, _pattern_color(base), side, rng)
    places = list(PLACES[layout, number])
    if layout == "beside":
        rng.shuffle(places)
    every = figures if len(figures) == number else [figures[0]] * number
    for (thing, color, size), place in zip(every, places, strict=True):
        _draw_figure(canvas, thing, _shade(COLORS[color], rng), SIZES[size], place, side, rng)
    return image.reduce(OVERSAMPLING)


def _draw_figure(
    canvas: "ImageDraw.ImageDraw",
    thing: str,
    color: Color,
    size: float,
    place: tuple[float, float, float],
    side: int,
    rng: random.Random,
) -> None:
    x, y, radius = place
    x, y = (side * (value + rng.uniform(-SWAY, SWAY)) for value in (x, y))
    radius *= side * size * (1 + rng.uniform(-GROWTH, GROWTH))
    angle = rng.uniform(-TURN, TURN)
    cos, sin = radius * math.cos(angle), radius * math.sin(angle)
    for tone, polygon in _parts(thing):
        points = [(x + cos * u - sin * v, y + sin * u + cos * v) for u, v in polygon]
        canvas.polygon(points, fill=_mixed(color, TONES[tone]))


def _draw_pattern(canvas: "ImageDraw.ImageDraw", pattern: str, color: Color, side: int, rng: random.Random) -> None:
    """Stripes, dots or checks over the whole side, at a width and a beginning of their own."""
    step = side / rng.uniform(7, 9)
    left, top = rng.uniform(-2 * step, 0), rng.uniform(-2 * step, 0)
    for row in range(11):
        y = top + row * step
        if pattern == "striped":
            canvas.rectangle((0, y, side, y + step / 2), fill=color)
            continue
        for column in range(11):
            x = left + column * step
            if pattern == "dotted":
                canvas.ellipse((x, y, x + step / 2, y + step / 2), fill=color)
            elif pattern == "checked" and (row + column) % 2:
                canvas.rectangle((x, y, x + step, y + step), fill=color)


def _shade(color: Color, rng: random.Random) -> Color:
    red, green, blue = (min(max(value + rng.randint(-COLOR_SPREAD, COLOR_SPREAD), 0), 255) for value in color)
    return red, green, blue


def _mixed(color: Color, tone: float) -> Color:
    goal = 255 if tone > 0 else 0
    red, green, blue = (round(value + abs(tone) * (goal - value)) for value in color)
    return red, green, blue


def _pattern_color(ground: Color) -> Color:
    """A lighter shade of a dark background, a darker one of a light background."""
    return _mixed(ground, PATTERN_TONE if sum(ground) < 3 * 150 else -PATTERN_TONE)


@functools.cache
def _parts(thing: str) -> tuple[Part, ...]:
    """The polygons of a thing, the first at the back."""
    circle = _arc(0, 0, 1, 1)
    parts: dict[str, tuple[Part, ...]] = {
        "circle": (("main", circle),),
        "square": (("main", _box(-0.85, -0.85, 0.85, 0.85)),),
        "triangle": (("main", ((0, -1), (0.95, 0.75), (-0.95, 0.75))),),
        "star": (("main", _spikes(5, 0.42)),),
        # One polygon: out along the rim, back along the hole.
        "ring": (("main", (*_arc(0, 0, 1, 1, 0, 1), *reversed(_arc(0, 0, 0.58, 0.58, 0, 1)))),),
        "cross": (("main", _box(-0.3, -0.95, 0.3, 0.95)), ("main", _box(-0.95, -0.3, 0.95, 0.3))),
        "heart": (("main", _heart()),),
        "diamond": (("main", ((0, -1), (0.68, 0), (0, 1), (-0.68, 0))), ("light", ((0, -1), (0.25, 0), (0, 1)))),
        "moon": (("main", (*_arc(0, 0, 1, 1, 0.1, 0.9), *reversed(_arc(0.42, 0, 0.72, 0.78, 0.13, 0.87)))),),
        "house": (
            ("main", _box(-0.7, -0.15, 0.7, 0.9)),
            ("dark", ((0, -1), (0.95, -0.1), (-0.95, -0.1))),
            ("light", _box(-0.2, 0.3, 0.2, 0.9)),
        ),
        "tree": (
            ("dark", _box(-0.16, 0.5, 0.16, 1)),
            ("main", ((0, -1), (0.55, -0.2), (-0.55, -0.2))),
            ("main", ((0, -0.6), (0.85, 0.6), (-0.85, 0.6))),
        ),
        "fish": (
            ("dark", ((0.35, 0), (1, -0.55), (1, 0.55))),
            ("main", _arc(-0.2, 0, 0.8, 0.5)),
            ("light", _arc(-0.6, -0.12, 0.13, 0.13)),
        ),
        "cup": (
            ("dark", (*_arc(0.55, 0, 0.45, 0.45, 0, 1), *reversed(_arc(0.55, 0, 0.22, 0.22, 0, 1)))),
            ("main", ((-0.85, -0.7), (0.55, -0.7), (0.4, 0.8), (-0.7, 0.8))),
            ("light", _arc(-0.15, -0.7, 0.7, 0.18)),
        ),
        "boat": (
            ("main", ((-1, 0.3), (1, 0.3), (0.6, 0.9), (-0.6, 0.9))),
            ("light", ((0, -1), (0.75, 0.15), (0, 0.15))),
            ("dark", ((-0.1, -0.7), (-0.1, 0.15), (-0.6, 0.15))),
        ),
        "flower": (
            *(("main", _arc(0.58 * x, 0.58 * y, 0.42, 0.42)) for x, y in _arc(0, 0, 1, 1, steps=6)),
            ("light", _arc(0, 0, 0.36, 0.36)),
        ),
        "mushroom": (
            ("light", _box(-0.25, 0, 0.25, 0.95)),
            ("main", _arc(0, 0.1, 1, 1, 0.5, 1)),
            ("light", _arc(-0.35, -0.35, 0.17, 0.17)),
            ("light", _arc(0.35, -0.3, 0.17, 0.17)),
        ),
    }
    return parts[thing]


def _arc(
    x: float, y: float, radius_x: float, radius_y: float, start: float = 0, end: float = 1, steps: int = 24
) -> Polygon:
    """Points along an ellipse, clockwise from the right; `start` and `end` in whole turns."""
    turns = (start + (end - start) * index / steps for index in range(steps + 1))
    return tuple((x + radius_x * math.cos(math.tau * turn), y + radius_y * math.sin(math.tau * turn)) for turn in turns)


def _box(left: float, top: float, right: float, bottom: float) -> Polygon:
    return ((left, top), (right, top), (right, bottom), (left, bottom))


def _spikes(count: int, inner: float) -> Polygon:
    """A star: `count` points on the unit circle, the first on top, and notches at the radius `inner`."""
    corners = ((inner if index % 2 else 1.0, math.pi * index / count) for index in range(2 * count))
    return tuple((radius * math.sin(angle), -radius * math.cos(angle)) for radius, angle in corners)


def _heart() -> Polygon:
    """The usual curve: x = 16 sin^3 t, y = 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, scaled into the square."""
    angles = [math.tau * index / 28 for index in range(28)]
    return tuple(
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16,
        )
        for t in angles
    )
