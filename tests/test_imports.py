"""Imports go downward only, and `import ds_vit` costs nothing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from project import ROOT, project_files

PACKAGE = ROOT / "ds_vit"

# From the doors to the tools, a row each. A module may import from lower rows and from its own package.
LAYERS: tuple[str, ...] = (
    "__main__",
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
    "device",
    "randomness",
)
DEPTH = {name: depth for depth, name in enumerate(LAYERS)}


def imports(source: str, package: str = "ds_vit") -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a file, inside functions too; `from a import b` gives a.b.

    `package` is the dotted package that the file lies in, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: -(node.level - 1) or None] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


FLAGS_OF_A_TASK = re.compile(r"ds_vit\.tasks\.(\w+\.)?flags\b")


def layer_of(name: str) -> str:
    """The top-level module of a dotted name; the flags of a task, which the schema takes in, are of config."""
    return "config" if FLAGS_OF_A_TASK.match(name) else name.split(".")[1]


def wrong_imports(source: str, module: str, package: str) -> list[tuple[int, str]]:
    """The (line, module) that a file of top-level module `module` must not import."""
    found = {(line, layer_of(name)) for line, name in imports(source, package) if name.startswith("ds_vit.")}
    return sorted((line, name) for line, name in found if name != module and DEPTH.get(name, -1) <= DEPTH[module])


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
        found = wrong_imports(
            path.read_text(), layer_of(f"{package}.{path.stem}") if path.parent != PACKAGE else module, package
        )
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
        ("from ds_vit.tasks.mae import flags", [(1, "config")]),
        ("from ds_vit.tasks.mae.task import MaskedAutoencoding", [(1, "tasks")]),
    ],
)
def test_the_rule_sees_every_way_to_import(source, wrong):
    # Catches: a rule that never fails.
    assert wrong_imports(source, "models", "ds_vit.models") == wrong


def test_every_import_is_a_dependency():
    # Catches: a package that happens to be there because another one needs it, and goes when that one does.
    text = (ROOT / "pyproject.toml").read_text()
    declared = {name.lower().replace("_", "-") for name in re.findall(r'[\[ ]"([\w-]+)', text)}
    provides = packages_distributions()
    missing = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        names = {name.partition(".")[0] for _, name in imports(path.read_text())}
        for name in names - {"ds_vit"} - sys.stdlib_module_names:
            distributions = {d.lower().replace("_", "-") for d in provides.get(name, [name])}
            if not distributions & declared:
                missing.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not missing, f"declare in pyproject.toml: {missing}"


def test_importing_the_package_imports_nothing_heavy():
    # Catches: `import ds_vit` that takes seconds (torch, timm, DeepSpeed).
    code = "import sys; before = set(sys.modules); import ds_vit; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert out.stdout.split() == ["ds_vit"]


def test_the_flags_of_a_task_import_nothing_heavy():
    # Catches: a --help that waits for torch; flags that can only be imported after the schema.
    for path in sorted(PACKAGE.glob("tasks/**/flags.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        code = f"import sys, {name}; print({{'torch', 'timm', 'deepspeed'}} & set(sys.modules))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
        assert out.stdout == "set()\n", (name, out.stdout, out.stderr)


def import_graph() -> dict[str, set[str]]:
    """Module of ds_vit → modules of ds_vit that it imports, inside functions and under TYPE_CHECKING too."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = {one if one in names else one.rpartition(".")[0] for _, one in imports(path.read_text(), package)}
        graph[name] = found & set(names)
    return graph


def test_no_import_circles():
    # Catches: two modules that need each other, which then belong together or need a third.
    graph = import_graph()
    assert graph["ds_vit.training.trainer"], "the graph is of other files"
    TopologicalSorter(graph).prepare()  # raises a CycleError that names them


def test_one_module_names_kinds_of_accelerators():
    """Would catch code that only runs on CUDA where torch.accelerator serves every kind."""
    kinds = re.compile(r"(cuda|xpu|hpu|npu)(:\d+)?")
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "device.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [getattr(node, field, None) for field in ("id", "attr", "arg")]
            names += [node.value] if isinstance(node, ast.Constant) else []
            wrong = [name for name in names if isinstance(name, str) and kinds.fullmatch(name.removeprefix("is_"))]
            found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in wrong]
    assert not found


def test_the_page_on_the_structure_names_what_exists():
    # Catches: a file or a name that was moved, renamed or removed, and is still on the page.
    files = [path.relative_to(ROOT).as_posix() for path in project_files()]
    code = set(re.findall(r"\w+", "\n".join((ROOT / f).read_text() for f in files if f.endswith(".py"))))
    code.add("_train_schedule")  # DeepSpeed's
    missing = []
    for name in set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "architecture.md").read_text())):
        if "/" in name or name.endswith((".py", ".html")):
            known = any(f"/{name.rstrip('/')}/" in f"/{file}/" for file in files)
        else:
            known = set(re.findall(r"\w+", name)) <= code
        missing += [] if known else [name]
    assert not missing
