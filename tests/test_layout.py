"""Which parts of the package may know which: read from the import statements of its source, whether they run or not."""

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import rwkvclip_cli

ROOT = Path(rwkvclip_cli.__file__).parent
PACKAGE = ROOT.name
# Where a distribution's module has another name.
MODULES = {"nvidia-dali-cuda120": "nvidia", "pillow": "PIL"}
FREE_OF_TORCH = ("launch", "config", "console", "data.recordio", "data.record_index", "cli", "nccl_check", "demo")


def module_name(path: Path) -> str:
    """rwkvclip_cli/data/recordio.py -> rwkvclip_cli.data.recordio; a package is named after its folder."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(name: str, source: str, *, at_load: bool = False) -> set[str]:
    """What a module's statements import: modules of this package in full, others by their first word.

    `at_load`: only what its loading imports, not what its functions do or a type checker alone sees.
    """
    found = set()
    for node in statements(ast.parse(source), at_load):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            origin = str(node.module)
            members = {f"{origin}.{alias.name}" for alias in node.names}
            found |= {member if member in SOURCES else origin for member in members}
    return {each if each in SOURCES else each.partition(".")[0] for each in found}


def statements(node: ast.AST, at_load: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_lazy = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not (at_load and (is_lazy or is_typing)):
            yield child
            yield from statements(child, at_load)


ALL = {name: imports(name, path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
AT_LOAD = {name: imports(name, path.read_text(encoding="utf-8"), at_load=True) for name, path in SOURCES.items()}


def inside(room: str) -> list[str]:
    """The modules of a room (`launch`) or the one of that name (`config`)."""
    prefix = f"{PACKAGE}.{room}"
    found = [name for name in SOURCES if name == prefix or name.startswith(f"{prefix}.")]
    assert found, f"there is no {prefix}"
    return found


def reached(start: str, graph: dict[str, set[str]]) -> set[str]:
    """All that a module leads to; loading one loads the packages that it lies in."""
    found: set[str] = set()
    todo = {start}
    while todo:
        name = todo.pop()
        found.add(name)
        parents = {name.rsplit(".", step)[0] for step in range(1, name.count(".") + 1)}
        todo |= (graph.get(name, set()) | (parents if name in SOURCES else set())) - found
    return found


def test_statements_are_read_as_python_reads_them() -> None:
    source = (
        "import torch.nn, json\nfrom rwkvclip_cli import console, __version__\nfrom rwkvclip_cli.config import option\n"
        "if TYPE_CHECKING:\n    import numpy\ndef f():\n    from rwkvclip_cli.data import packed\n"
        "class C:\n    import rich\n"
    )
    at_load = {"torch", "json", "rwkvclip_cli", "rwkvclip_cli.console", "rwkvclip_cli.config", "rich"}
    assert imports("example", source, at_load=True) == at_load
    assert imports("example", source) == at_load | {"numpy", "rwkvclip_cli.data.packed"}


@pytest.mark.parametrize("room", FREE_OF_TORCH)
def test_loading_what_must_be_light_never_loads_torch(room: str) -> None:
    for name in inside(room):
        assert "torch" not in reached(name, AT_LOAD), name


@pytest.mark.parametrize("room", ["launch", "config", "console", "data.recordio", "data.record_index"])
def test_what_never_needs_torch_imports_it_nowhere(room: str) -> None:
    for name in inside(room):
        assert "torch" not in ALL[name], name


@pytest.mark.parametrize(
    ("room", "others"),
    [
        (
            "console",
            ("bench", "cli", "config", "data", "demo", "inspect", "launch", "model", "nccl", "nccl_check", "train"),
        ),
        ("config", ("bench", "cli", "data", "demo", "inspect", "launch", "model", "nccl", "nccl_check", "train")),
        ("data", ("bench", "cli", "demo", "inspect", "launch", "model", "nccl", "nccl_check", "train")),
        ("train.losses", ("bench", "cli", "data", "demo", "inspect", "launch", "model", "nccl", "nccl_check")),
        ("model", ("bench", "cli", "data", "demo", "inspect", "launch", "nccl", "nccl_check", "train")),
        ("launch", ("bench", "cli", "data", "demo", "inspect", "model", "nccl", "nccl_check", "train")),
        ("nccl", ("bench", "cli", "data", "demo", "inspect", "model", "nccl_check", "train")),
        ("train", ("bench", "cli", "demo", "inspect", "nccl", "nccl_check")),
        ("bench", ("cli", "inspect", "launch", "nccl", "nccl_check")),
        ("demo", ("bench", "cli", "inspect", "model", "nccl", "nccl_check")),
        ("inspect", ("bench", "cli", "demo", "launch", "model", "nccl", "nccl_check")),
    ],
)
def test_rooms_know_only_what_lies_below_them(room: str, others: tuple[str, ...]) -> None:
    forbidden = {name for other in others for name in inside(other)}
    assert {name: ALL[name] & forbidden for name in inside(room) if ALL[name] & forbidden} == {}


def test_only_the_module_that_runs_it_knows_the_command_line() -> None:
    assert [name for name in SOURCES if f"{PACKAGE}.cli" in ALL[name]] == [f"{PACKAGE}.__main__"]


def test_no_imports_go_in_a_circle_not_even_those_inside_functions() -> None:
    try:
        graphlib.TopologicalSorter(ALL).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_every_dependency_is_imported_somewhere() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in project["dependencies"]]
    lines = [line for path in SOURCES.values() for line in path.read_text(encoding="utf-8").splitlines()]
    statements = "\n".join(line for line in lines if re.match(r"\s*(from|import) ", line))
    assert [name for name in names if not re.search(rf"\b{MODULES.get(name, name)}\b", statements)] == []
