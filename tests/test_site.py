"""The documentation as a site: all pages are in it, links and anchors end somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from project import ROOT

LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|icon|preload))[^>]*href=[\"']?(?:https?:)?//"
    r"|@import|url\([\"']?(?:https?:)?//|class=[\"']?mermaid"  # Material fetches mermaid from another host
)

pytestmark = pytest.mark.slow  # the site is built in 15 s


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built folder."""
    if not all(map(importlib.util.find_spec, ("material", "mkdocstrings"))):
        pytest.skip("mkdocs-material and mkdocstrings are not installed: pip install 'ds-vit[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_on_the_site(site):
    """A page that nobody finds, a reference without docstrings; a link or an anchor that ends nowhere (`--strict`)."""
    pages = [
        *(path.relative_to(ROOT / "docs").with_suffix(".html") for path in ROOT.glob("docs/**/*.md")),
        "index.html",
    ]
    text = (site / "index.html").read_text()
    assert [str(page) for page in pages if not (site / page).is_file() or f'href="{page}"' not in text] == []
    reference = (site / "reference" / "api.html").read_text()
    assert 'id="ds_vit.api.train"' in reference
    assert 'href="https://squidfunk' in text  # of the pattern below: what links is no request


def test_nothing_is_fetched_from_other_hosts(site):
    """A font, script or picture of another host: who reads the pages would be known there."""
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 30
    assert [str(path) for path in pages if LOADED.search(path.read_text())] == []
    for fetched in ('<script src="https://x.org/a.js">', "<img src='//x.org/a.png'>", "url(https://x.org/font)"):
        assert LOADED.search(fetched)
