"""The layout of the design, held to the tree: who may import whom, what ships, how long a file is.

Each rule is a function over a folder, so that it is also run on a folder where it is broken.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RANK = {"routing": 0, "stages": 1, "pipeline": 2, "paceline": 3, "tools": 4}
SHIPPED = ("routing", "stages", "pipeline")
WEIGHTY = {"torch", "transformers", "bitsandbytes", "safetensors", "gguf"}
LONGEST = 350


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of all our modules but the tests."""
    files = [file for top in RANK for file in sorted((root / top).rglob("*.py"))]
    files += [root / "paceline.py"] if (root / "paceline.py").exists() else []
    found = {}
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name: str, file: Path, *, top_level: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of what a module imports: anywhere in it, or as it is loaded.

    `from a import b` gives both a and a.b, since b may be a module.
    """
    tree = ast.parse(file.read_text())
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, source
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def upward_imports(root: Path) -> list[str]:
    """Imports against the arrows tools -> paceline -> pipeline -> stages -> routing."""
    return [
        f"{file.relative_to(root)}:{line} imports {target}"
        for name, file in modules(root).items()
        for line, target in imports(name, file)
        if RANK.get(target.split(".")[0], -1) > RANK[name.split(".")[0]]
        or target.split(".")[0] == "tests"
    ]


def weighty_imports(root: Path) -> list[str]:
    """Imports of torch and its kind by what ships, outside stages."""
    return [
        f"{file.relative_to(root)}:{line} imports {target}"
        for name, file in modules(root).items()
        for line, target in imports(name, file)
        if target.split(".")[0] in WEIGHTY and name.split(".")[0] not in ("stages", "tools")
    ]


def actors(root: Path) -> set[str]:
    """Modules that define a subclass of Actor."""

    def is_actor(node: ast.AST) -> bool:
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        return any(ast.unparse(base).split(".")[-1].split("[")[0] == "Actor" for base in bases)

    return {
        name
        for name, file in modules(root).items()
        if any(is_actor(node) for node in ast.walk(ast.parse(file.read_text())))
    }


def actors_that_know_each_other(root: Path) -> list[str]:
    """Imports of one actor's module by another's."""
    known, found = actors(root), modules(root)
    return [
        f"{name}:{line} imports {target}"
        for name in sorted(known)
        for line, target in imports(name, found[name])
        if target in known - {name}
    ]


def circle(root: Path) -> list[str]:
    """A circle of modules that load each other, or nothing."""
    found = modules(root)
    edges = {
        name: {t for _, t in imports(name, file, top_level=True) if t in found} - {name}
        for name, file in found.items()
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges[name]):
            if closed := visit(target, [*path, name]):
                return closed
        done.add(name)
        return []

    return next((closed for name in sorted(found) if (closed := visit(name, []))), [])


def packages(root: Path) -> set[str]:
    """Every folder with Python files under what ships, as a package name."""
    folders = {file.parent for top in SHIPPED for file in (root / top).rglob("*.py")}
    return {".".join(folder.relative_to(root).parts) for folder in folders}


def others(root: Path) -> set[str]:
    """Every file under what ships that is neither Python nor made from what is there."""
    files = [file for top in SHIPPED for file in (root / top).rglob("*") if file.is_file()]
    made = {".py", ".so", ".pyd"}
    # A process that was killed while it compiled leaves a file of any name in its cache.
    files = [file for file in files if file.parent.name != "__pycache__"]
    return {file.relative_to(root).as_posix() for file in files if file.suffix not in made}


def test_imports_go_down_only() -> None:
    assert upward_imports(ROOT) == []


def test_only_stages_imports_torch_and_its_kind() -> None:
    assert weighty_imports(ROOT) == []


def test_actors_never_import_each_other() -> None:
    assert actors_that_know_each_other(ROOT) == []


def test_there_are_five_actors() -> None:
    names = {name.split(".")[-1] for name in actors(ROOT)}
    assert names == {"router", "prefetcher", "drafter", "verifier", "committer"}


def test_no_modules_load_each_other_in_a_circle() -> None:
    assert circle(ROOT) == []


def test_what_ships_is_listed_exactly() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(setup["packages"]) == packages(ROOT)
    at_root = sorted(file.stem for file in ROOT.glob("*.py"))
    assert at_root == [*setup["py-modules"], "setup"] == ["paceline", "setup"]
    data = {f"{name}/{file}" for name, files in setup["package-data"].items() for file in files}
    assert data == others(ROOT)
    for package in setup["packages"]:
        assert (ROOT / package.replace(".", "/") / "__init__.py").exists(), package


def test_no_module_is_too_long() -> None:
    lengths = {name: len(file.read_text().splitlines()) for name, file in modules(ROOT).items()}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


# --- The rules notice when they are broken. ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree that keeps every rule."""
    for top in RANK:
        if top != "paceline":
            (tmp_path / top).mkdir()
            (tmp_path / top / "__init__.py").write_text("")
    (tmp_path / "paceline.py").write_text("from pipeline import engine\n")
    (tmp_path / "routing/actor.py").write_text("class Actor: ...\n")
    (tmp_path / "routing/router.py").write_text(
        "from routing.actor import Actor\nclass Router(Actor): ...\n"
    )
    (tmp_path / "stages/drafter.py").write_text(
        "import torch\nfrom routing import actor\nclass Drafter(actor.Actor): ...\n"
    )
    (tmp_path / "pipeline/engine.py").write_text("from stages import drafter\n")
    return tmp_path


def broken_rules(root: Path) -> set[str]:
    rules = (upward_imports, weighty_imports, actors_that_know_each_other, circle)
    return {rule.__name__ for rule in rules if rule(root)}


def test_the_small_tree_keeps_every_rule(tree: Path) -> None:
    assert broken_rules(tree) == set()
    assert actors(tree) == {"routing.router", "stages.drafter"}


@pytest.mark.parametrize(
    ("file", "line", "rules"),
    [
        ("routing/late.py", "def f():\n    from stages import drafter", {"upward_imports"}),
        ("stages/up.py", "from pipeline.engine import Engine", {"upward_imports"}),
        ("stages/helped.py", "import tests.made", {"upward_imports"}),
        ("pipeline/heavy.py", "import torch.nn", {"weighty_imports"}),
        ("pipeline/quiet.py", "def f():\n    from safetensors import torch", {"weighty_imports"}),
        (
            "stages/verifier.py",
            "from . import drafter\nfrom routing.actor import Actor\nclass Verifier(Actor): ...",
            {"actors_that_know_each_other"},
        ),
        ("stages/__init__.py", "import stages.a", set()),
    ],
)
def test_a_broken_rule_is_noticed(tree: Path, file: str, line: str, rules: set[str]) -> None:
    (tree / file).write_text(line + "\n")
    assert broken_rules(tree) == rules


def test_a_circle_is_noticed(tree: Path) -> None:
    (tree / "stages/a.py").write_text("from stages.b import x\n")
    (tree / "stages/b.py").write_text("from stages import a\n")
    assert circle(tree) == ["stages.a", "stages.b", "stages.a"]


def test_a_package_that_is_not_listed_is_noticed(tree: Path) -> None:
    (tree / "stages/extra").mkdir()
    (tree / "stages/extra/new.py").write_text("")
    assert packages(tree) == {"routing", "stages", "pipeline", "stages.extra"}


def test_a_file_that_is_not_listed_is_noticed(tree: Path) -> None:
    assert others(tree) == set()
    (tree / "stages/new.c").write_text("")
    (tree / "stages/_new.abi3.so").write_text("")
    (tree / "stages/__pycache__").mkdir()
    (tree / "stages/__pycache__/new.cpython-311.pyc.140234").write_text("")
    assert others(tree) == {"stages/new.c"}
