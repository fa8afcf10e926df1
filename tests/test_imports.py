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
    "interop",
    "checkpoint",
    "engine",
    "monitoring",
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
