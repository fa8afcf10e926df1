"""The build's one step beyond pyproject.toml: a wheel has ds_configs/ and launch/ too, under ds_vit/shipped/."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("ds_configs", "launch")
OF_A_CLONE = shutil.ignore_patterns("setup.sh", "test.sh", "quickstart.sh", "__pycache__")


class BuildWithFiles(build_py):
    """Copies the folders that `ds_vit/config/shipped.py` looks into."""

    def run(self) -> None:
        """As `build_py.run`."""
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                to = Path(self.build_lib, "ds_vit", "shipped", name)
                shutil.copytree(Path(__file__).parent / name, to, ignore=OF_A_CLONE, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFiles})
