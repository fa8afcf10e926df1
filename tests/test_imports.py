"""Imports go downward only, and `import ds_vit` costs nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from project import ROOT

PACKAGE = ROOT / "ds_vit"

# From the doors to the tools, a row each. A module may import from lower rows and from its own package.
LAYERS: tuple[str, ...] = (
    "cli",
    "api",
    "tools",
    "train",
    "training",
    "weights",
    "checkpoint",
    "monitoring",
    "engine",
    "planner",
    "optim",
    "tasks",
    "parallel",
    "data",
    "config",
    "models",
    "launching",
    "fault_tolerance",
    "randomness",
    "run_folder",
)
DEPTH = {name: depth for depth, name in enumerate(LAYERS)}


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level module of ds_vit) of every import of ds_vit in a file, inside functions too.

    `package` is the dotted package that the file lies in, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "ds_vit" else [module]
        yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("ds_vit."))


def wrong_imports(source: str, module: str, package: str) -> list[tuple[int, str]]:
    """The (line, module) that a file of top-level module `module` must not import."""
    found = imported_modules(source, package)
    return [(line, name) for line, name in found if name != module and DEPTH.get(name, -1) <= DEPTH[module]]


def modules() -> dict[str, list[Path]]:
    """Top-level module or package of ds_vit → its files."""
    found = {path.stem: [path] for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    found |= {path.parent.name: sorted(path.parent.rglob("*.py")) for path in PACKAGE.glob("*/__init__.py")}
    return found


def test_every_module_has_a_layer():
    # Catches: a new module that the rule below would not see, and a row for one that is gone.
    assert set(modules()) == set(DEPTH), "give each module of ds_vit one place in LAYERS"


@pytest.mark.parametrize("module", sorted(DEPTH))
def test_imports_go_downward(module):
    # Catches: a model that reads the run's config, an engine that knows the training loop: what makes cycles.
    wrong = []
    for path in modules().get(module, []):
        package = ".".join(["ds_vit", *path.relative_to(PACKAGE).parent.parts])
        found = wrong_imports(path.read_text(), module, package)
        wrong += [f"{path.relative_to(PACKAGE.parent)}:{line} imports ds_vit.{name}" for line, name in found]
    assert not wrong, f"upward imports: {wrong}"


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from ds_vit.randomness import mix", []),
        ("from ds_vit.models.layers import Layer", []),
        ("import ds_vit", []),
        ("import ds_vit.train", [(1, "train")]),
        ("from ds_vit import randomness, train", [(1, "train")]),
        ("from .. import engine", [(1, "engine")]),
        ("from ..data.order import Share", [(1, "data")]),
        ("from . import layers", []),
        ("def f():\n    from ds_vit.config import RunConfig", [(2, "config")]),
    ],
)
def test_the_rule_sees_every_way_to_import(source, wrong):
    # Catches: a rule that never fails.
    assert wrong_imports(source, "models", "ds_vit.models") == wrong


def other_packages(source: str) -> set[str]:
    """Top-level names of what a file imports from outside the package and the standard library."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found - {"ds_vit"} - sys.stdlib_module_names


def test_every_import_is_a_dependency():
    # Catches: a package that happens to be there because another one needs it, and goes when that one does.
    text = (ROOT / "pyproject.toml").read_text()
    declared = {name.lower().replace("_", "-") for name in re.findall(r'[\[ ]"([\w-]+)', text)}
    provides = packages_distributions()
    missing = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in other_packages(path.read_text()):
            distributions = {d.lower().replace("_", "-") for d in provides.get(name, [name])}
            if not distributions & declared:
                missing.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not missing, f"declare in pyproject.toml: {missing}"


def test_importing_the_package_imports_nothing_heavy():
    # Catches: `import ds_vit` that takes seconds (torch, timm, DeepSpeed).
    code = "import sys; before = set(sys.modules); import ds_vit; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert out.stdout.split() == ["ds_vit"]


# A resolved run with all its settings. Components take small configs (training/build.py makes them).
WHOLE_RUN = {"Resolved", "resolve_run"}


def knows_whole_run(source: str) -> bool:
    """Whether a file names the class of a resolved run, the function that makes one, or takes a `resolved` untyped."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.alias(name=name) | ast.Name(id=name) | ast.Attribute(attr=name) | ast.ClassDef(name=name):
                known = name in WHOLE_RUN
            case ast.arg(arg=name, annotation=annotation):
                words = re.findall(r"\w+", ast.unparse(annotation)) if annotation else []
                known = bool(WHOLE_RUN & {*words}) or (name == "resolved" and annotation is None)
            case _:
                known = False
        if known:
            return True
    return False


def test_few_files_know_the_whole_run():
    # Catches: a component that reads settings through a chain of attributes of everything.
    knowing = [str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py") if knows_whole_run(path.read_text())]
    assert 0 < len(knowing) <= 4, f"give each component a small config of its own: {sorted(knowing)}"


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("from ds_vit.training.resolve import Resolved as Run", True),
        ("from ds_vit.training import resolve\nrun = resolve.resolve_run(*words)", True),
        ("def f(run: Resolved | None): pass", True),
        ("def f(run: 'Resolved'): pass", True),
        ("def f(resolved): pass", True),
        ("from ds_vit.training.resolve.model import ModelConfig\ndef f(model: ModelConfig): pass", False),
    ],
)
def test_every_way_to_know_the_run_is_seen(source, known):
    # Catches: a count that is always low.
    assert knows_whole_run(source) == known


def circles(graph: dict[str, set[str]]) -> set[str]:
    """The nodes that can be reached from themselves."""

    def reached(node: str) -> set[str]:
        seen, left = set(), [*graph[node]]
        while left:
            if (one := left.pop()) not in seen:
                seen.add(one)
                left += graph.get(one, ())
        return seen

    return {node for node in graph if node in reached(node)}


def import_graph() -> dict[str, set[str]]:
    """Module of ds_vit → modules of ds_vit that it imports, inside functions and under TYPE_CHECKING too."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {one if one in names else node.module for one in inner}
        graph[name] = found & set(names)
    return graph


def test_no_import_circles():
    # Catches: two modules that need each other, which then belong together or need a third.
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}
    graph = import_graph()
    assert graph["ds_vit.training.trainer"], "the graph is of other files"
    assert not circles(graph)
