"""A wheel, as somebody installs it who has no clone: `ds-vit` from any folder, with the shipped files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
from project import ROOT, project_files

from ds_vit.config.parser import or_shipped

SHORT = ("--max-steps", "1", "-b", "8", "--workers", "0", "--lr", "1e-3", "--checkpoint-interval", "0")
TINY = ("--val-split", "", "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=2")


def test_shipped_files_are_found_from_any_folder(tmp_path, monkeypatch):
    """A recipe that is found beside the clone alone; a file of one's own that gives way to a shipped one."""
    monkeypatch.chdir(tmp_path)
    assert or_shipped("ds_configs/zero1_bf16.json") == str(ROOT / "ds_configs" / "zero1_bf16.json")
    assert or_shipped("launch/recipes/digits.yaml") == str(ROOT / "launch" / "recipes" / "digits.yaml")
    for name in ("ds_configs/nowhere.json", "zero1_bf16.json", "README.md", ""):
        assert or_shipped(name) == name
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs" / "zero1_bf16.json").touch()
    assert or_shipped("ds_configs/zero1_bf16.json") == "ds_configs/zero1_bf16.json"


@pytest.mark.slow
def test_a_wheel_trains_outside_the_clone(tmp_path):
    """A module or a file that is not packed; a program that needs its source beside it."""
    files = project_files()
    if not files:
        pytest.skip("not a git clone")
    clone = tmp_path / "clone"
    for path in files:
        if not path.relative_to(ROOT).parts[0].startswith(("tests", "docs")):
            copy = clone / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    (clone / "docs").mkdir()
    build = "from setuptools import build_meta as b; b.build_wheel('../dist'); b.build_sdist('../dist')"
    done = subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("ds_vit-")}
    package = {str(path.relative_to(ROOT)) for path in files if path.relative_to(ROOT).parts[0] == "ds_vit"}
    assert package - packed == set()
    assert "ds_vit/shipped/launch/recipes/digits.yaml" in packed
    [about] = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    described = zipfile.ZipFile(wheel).read(about).decode()
    assert "\n# ds_vit\n" in described
    assert "docs/planning.md" in described
    assert re.findall(r"\]\((?!https?:)", described) == [], "a link into the repository, dead where there is none"
    [sdist] = (tmp_path / "dist").glob("*.tar.gz")
    listed = subprocess.run(["tar", "tf", str(sdist)], check=True, capture_output=True, text=True).stdout
    assert "/ds_configs/zero1_bf16.json\n" in listed

    home = tmp_path / "venv"
    venv.create(home)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # torch and the like, as they are here
    python = home / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel]
    done = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True)
    if done.returncode:  # an environment without pip: uv's
        zipfile.ZipFile(wheel).extractall(site)
        program = [python, "-m", "ds_vit.cli"]
    else:
        subprocess.run(install, check=True)
        program = [home / "bin" / "ds-vit"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    words = ["--deepspeed_config", "ds_configs/cpu_zero1_fp32.json", "--recipe", "launch/recipes/digits.yaml"]
    words = ["launch", "-n", "2", "train", *words, *SHORT, *TINY, "--output", "run"]
    there = tmp_path / "elsewhere"
    there.mkdir()
    done = subprocess.run([*program, *words], cwd=there, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((there / "run" / "summary.json").read_text())
    assert (summary["exit"], summary["layout"]["dp"]) == ("completed", 2)
    assert "Repeat the run" in (there / "run" / "report.html").read_text()
    told = subprocess.run(
        [python, "-c", "import ds_vit; print(ds_vit.__file__)"], check=True, cwd=there, env=environ, capture_output=True
    )
    assert str(home) in told.stdout.decode()
