"""Drawn scenes show what their captions say, come out the same each time, and keep the held-out ones apart."""

import random
import re
from pathlib import Path

import pytest
from PIL import Image

from rwkvclip_cli.console import UsageError
from rwkvclip_cli.demo import drawing, scenes
from rwkvclip_cli.demo.scenes import Figure, Scene, captioned_scenes, describe, random_scene, write_scenes

STAR, RING = Figure("star", "red", "small"), Figure("ring", "blue", "large")
STACKED = Scene("stacked", (STAR, RING), 2, "yellow", "dotted")
CROP_EDGE = drawing.SIDE // 16  # what the evaluation's centre crop of 7/8 cuts from each side


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def is_near(pixel: tuple[int, int, int], color: str) -> bool:
    wanted = drawing.COLORS[color]
    return all(abs(value - other) <= drawing.COLOR_SPREAD for value, other in zip(pixel, wanted, strict=True))


def draw(scene: Scene, seed: int = 0) -> Image.Image:
    figures = [(figure.thing, figure.color, figure.size) for figure in scene.figures]
    return drawing.draw(scene.layout, figures, scene.number, (scene.ground, scene.pattern), random.Random(seed))


def middle_of(image: Image.Image, color: str) -> tuple[float, float]:
    """Mean (x, y) of the pixels near a colour, in shares of the side."""
    side = image.width
    places = [(x, y) for y in range(side) for x in range(side) if is_near(image.getpixel((x, y)), color)]  # type: ignore[arg-type]
    assert len(places) > 15, f"nothing {color}"
    return sum(x for x, _ in places) / len(places) / side, sum(y for _, y in places) / len(places) / side


def test_files_are_numbered_jpegs_with_three_captions(tmp_path: Path) -> None:
    write_scenes(tmp_path, 3, seed=0, held_out=False)
    stems = ("00000", "00001", "00002")
    assert sorted(contents(tmp_path)) == [f"{stem}.{suffix}" for stem in stems for suffix in ("jpg", "txt")]
    for stem in stems:
        with Image.open(tmp_path / f"{stem}.jpg") as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (80, 80))
        captions = (tmp_path / f"{stem}.txt").read_text(encoding="utf-8").splitlines()
        assert len(set(captions)) == 3
        assert all(captions)


def test_same_arguments_same_bytes_and_a_smaller_count_is_the_beginning(tmp_path: Path) -> None:
    write_scenes(tmp_path / "a", 20, seed=4, held_out=True)
    write_scenes(tmp_path / "b", 12, seed=4, held_out=True)
    write_scenes(tmp_path / "other-seed", 12, seed=5, held_out=True)
    write_scenes(tmp_path / "other-part", 12, seed=4, held_out=False)
    first = {name: data for name, data in contents(tmp_path / "a").items() if name < "00012"}
    assert contents(tmp_path / "b") == first
    for folder in ("other-seed", "other-part"):
        assert not set(contents(tmp_path / folder).values()) & set(first.values())


def test_each_combination_belongs_to_one_part_for_good() -> None:
    for held_out in (False, True):
        for seed in (0, 1):
            found = [scene for scene, _ in captioned_scenes(300, seed=seed, held_out=held_out)]
            assert len(set(found)) == 300
            assert {scene.is_held_out() for scene in found} == {held_out}


def test_where_a_scene_belongs_never_changes() -> None:
    # Literal, so that data written by different versions can be used together.
    scenes = {ground: Scene("stacked", (STAR, RING), 2, ground, "dotted") for ground in drawing.COLORS}
    assert [ground for ground, scene in scenes.items() if scene.is_held_out()] == ["red", "gray"]


@pytest.mark.parametrize(
    "other",
    [
        Scene("beside", (RING, STAR), 2, "yellow", "dotted"),
        Scene("stacked", (RING, STAR), 2, "yellow", "dotted"),
        Scene("stacked", (Figure("star", "pink", "small"), RING), 2, "yellow", "dotted"),
        Scene("stacked", (Figure("moon", "red", "small"), RING), 2, "yellow", "dotted"),
        Scene("stacked", (Figure("star", "red", "large"), RING), 2, "yellow", "dotted"),
        Scene("stacked", (STAR, RING), 2, "green", "dotted"),
        Scene("stacked", (STAR, RING), 2, "yellow", "plain"),
    ],
)
def test_every_attribute_is_in_the_captions(other: Scene) -> None:
    for seed in range(20):
        captions, others = (describe(scene, random.Random(seed)) for scene in (STACKED, other))
        assert not set(captions) & set(others)


def test_held_out_captions_are_distinct_and_new() -> None:
    held_out = [captions[0] for _, captions in captioned_scenes(512, seed=0, held_out=True)]
    training = {captions[0] for _, captions in captioned_scenes(2000, seed=0, held_out=False)}
    assert len(set(held_out)) == 512
    assert not training & set(held_out)


def test_mirror_images_are_one_scene() -> None:
    rng = random.Random(0)
    beside = [scene for scene in (random_scene(rng) for _ in range(400)) if scene.layout == "beside"]
    assert len(beside) > 50
    assert all(list(scene.figures) == sorted(scene.figures) for scene in beside)
    left = [
        middle_of(draw(Scene("beside", (RING, STAR), 2, "white", "plain"), seed), "red")[0] < 0.5 for seed in range(8)
    ]
    assert True in left
    assert False in left


def test_figures_and_background_differ_in_colour() -> None:
    rng = random.Random(1)
    for scene in (random_scene(rng) for _ in range(300)):
        colors = [scene.ground, *(figure.color for figure in scene.figures)]
        assert len(set(colors)) == len(colors)


def test_captions_as_written() -> None:
    assert describe(STACKED, random.Random(3)) == (
        "a large blue ring below a small red star, dotted yellow background",
        "a dotted yellow background, on it a huge blue hoop under a tiny crimson star",
        "A small red star floats above a big blue hoop against a dotted golden backdrop.",
    )


def test_above_and_below_are_told_right() -> None:
    orders = set()
    for seed in range(40):
        for caption in describe(STACKED, random.Random(seed)):
            star_is_above = caption.index("star") < re.search("ring|hoop", caption).start()  # type: ignore[union-attr]
            relation = re.search("above|over|below|under", caption).group()  # type: ignore[union-attr]
            assert star_is_above == (relation in ("above", "over")), caption
            orders.add(star_is_above)
    assert orders == {True, False}


def test_groups_say_how_many() -> None:
    scene = Scene("group", (Figure("fish", "orange", "small"),), 3, "blue", "plain")
    boxes = Scene("group", (Figure("square", "orange", "large"),), 2, "blue", "plain")
    for seed in range(20):
        for caption in describe(scene, random.Random(seed)):
            assert re.search("([Tt]hree|[Aa] trio of) (small|little|tiny) orange fish\\b", caption), caption
        for caption in describe(boxes, random.Random(seed)):
            assert re.search("([Tt]wo|[Aa] pair of) (large|big|huge) orange (squares|boxes)\\b", caption), caption


def test_the_upper_figure_is_drawn_above_the_lower_one() -> None:
    for seed in range(5):
        image = draw(Scene("stacked", (STAR, RING), 2, "white", "plain"), seed)
        assert middle_of(image, "red")[1] < 0.4
        assert middle_of(image, "blue")[1] > 0.6


@pytest.mark.parametrize("layout", list(drawing.PLACES), ids=str)
@pytest.mark.parametrize("thing", drawing.THINGS)
@pytest.mark.parametrize("seed", range(3))
def test_figures_show_their_colour_and_keep_inside_the_centre_crop(
    seed: int, thing: str, layout: tuple[str, int]
) -> None:
    figure = Figure(thing, "red", "large")
    figures = (figure,) if layout[0] in ("alone", "group") else (figure, figure)
    image = draw(Scene(layout[0], figures, layout[1], "white", "plain"), seed)
    middle_of(image, "red")
    image.paste(image.getpixel((0, 0)), (CROP_EDGE, CROP_EDGE, drawing.SIDE - CROP_EDGE, drawing.SIDE - CROP_EDGE))
    assert len(image.getcolors() or ()) == 1, "something is drawn at the edge"


def test_things_and_patterns_look_different() -> None:
    alone = {
        thing: draw(Scene("alone", (Figure(thing, "red", "large"),), 1, "white", "plain")) for thing in drawing.THINGS
    }
    assert len({image.tobytes() for image in alone.values()}) == len(drawing.THINGS) == 16
    striped = {pattern: draw(Scene("alone", (STAR,), 1, "blue", pattern)) for pattern in drawing.PATTERNS}
    colors = {pattern: len(image.crop((0, 0, 80, 15)).getcolors(10_000) or ()) for pattern, image in striped.items()}
    assert colors["plain"] == 1
    assert all(colors[pattern] > 1 for pattern in ("striped", "dotted", "checked"))
    assert len({image.tobytes() for image in striped.values()}) == 4


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_bytes(b"mine")
    with pytest.raises(UsageError, match="is not empty"):
        write_scenes(tmp_path, 3, seed=0, held_out=False)
    assert contents(tmp_path) == {"holiday.jpg": b"mine"}


def test_no_scenes_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1; got 0"):
        write_scenes(tmp_path / "new", 0, seed=0, held_out=False)
    assert not (tmp_path / "new").exists()


def test_words_cover_what_can_be_drawn() -> None:
    assert set(scenes.SIZE_WORDS) == set(drawing.SIZES)
    assert set(scenes.PATTERN_WORDS) == set(drawing.PATTERNS)
    assert set(scenes.COLOR_WORDS) <= set(drawing.COLORS)
    assert set(scenes.THING_WORDS) <= set(drawing.THINGS)
    assert all(words[0] == thing for thing, words in scenes.THING_WORDS.items())
