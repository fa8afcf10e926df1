"""Pages of the site that are not in docs/: the README and its like, and the API reference made of docstrings.

mkdocs calls the `on_…` functions (mkdocs.yml, `hooks`). Links are written for a code host, relative to the file that
has them; here each is turned to its page on the site. A file that is no page is linked under `repo_url`, or else named.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ds_configs/README.md": "ds_configs.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside docs/, and what they are called on the site."""

LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]+)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
REFERENCE = ("api", "config", "tasks", "models", "parallel", "parallel.tensor", "engine", "optim", "checkpoint", "data")
REFERENCE += ("planner", "fault_tolerance")
"""What of ds_vit has a page of its docstrings."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for name in REFERENCE:
        files.append(File.generated(config, f"reference/{name}.md", content=reference(f"ds_vit.{name}")))
    return files


def reference(module: str) -> str:
    """The page of a module: itself; or of a package, what it exports, or else each of its modules and a task's."""
    folder = ROOT / module.replace(".", "/")
    if not folder.is_dir() or "__all__" in (folder / "__init__.py").read_text():
        return f"::: {module}\n    options: {{heading_level: 1}}\n"
    files = [
        path for path in sorted(folder.glob("**/*.py" if module == "ds_vit.tasks" else "*.py")) if path.stem[0] != "_"
    ]
    modules = [f"::: {'.'.join(path.relative_to(ROOT).with_suffix('').parts)}\n" for path in files]
    return "\n".join([f"::: {module}\n    options: {{heading_level: 1, members: false}}\n", *modules])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links between files into links between pages, outside fenced blocks."""
    name = page.file.src_uri
    here = next((source for source, at in PAGES.items() if at == name), f"docs/{name}")

    def on_site(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(os.path.join(os.path.dirname(here), target))
        at = PAGES.get(path, path.removeprefix("docs/"))
        if path in PAGES or (path.startswith("docs/") and files.get_file_from_path(at)):
            return f"[{label}]({os.path.relpath(at, os.path.dirname(name) or '.')}{anchor})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{here} links to {target}, which does not exist")
        return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{path}{anchor})" if config.repo_url else label

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(on_site, part) for part in parts)
