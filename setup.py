"""The build's two steps beyond pyproject.toml.

A wheel has ds_configs/ and launch/ too, under ds_vit/shipped/; and its description is README.md for a reader without
the repository.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("ds_configs", "launch")
OF_A_CLONE = shutil.ignore_patterns("setup.sh", "test.sh", "quickstart.sh", "__pycache__")


class BuildWithFiles(build_py):
    """Copies the folders that `ds_vit/config/parser.py` looks into."""

    def run(self) -> None:
        """As `build_py.run`."""
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                to = Path(self.build_lib, "ds_vit", "shipped", name)
                shutil.copytree(Path(__file__).parent / name, to, ignore=OF_A_CLONE, dirs_exist_ok=True)


def description() -> str:
    """README.md without pictures and what is said of them, and with the repository's files named instead of linked."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n.*?\n\n", "", text, flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


setup(
    cmdclass={"build_py": BuildWithFiles},
    long_description=description(),
    long_description_content_type="text/markdown",
)
