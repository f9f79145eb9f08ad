"""The pages hold together: links lead somewhere, and nothing is left out. `.ci/run` builds the site of them."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

import hf_paged
from hf_paged import capacity

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FILES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *PAGES, *ROOT.glob("kernels/*.md"), *ROOT.glob("patches/*.md")]
EXTRA_PAGES = {"index"}  # nobody has to link to it

_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_INCLUDE = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)


def links(path: Path) -> list[str]:
    return [link for link in _LINK.findall(_CODE.sub("", read(path))) if not re.match("[a-z]+:", link)]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as git hosts and MyST make them."""
    text = read(path)
    for included in _INCLUDE.findall(text):
        text += read(path.parent / included)
    if path.stem == "command-line":
        text += "".join(f"\n## {command}" for command in commands())
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    unwanted = str.maketrans("", "", string.punctuation.replace("-", "").replace("_", ""))
    return {heading.lower().translate(unwanted).replace(" ", "-") for heading in headings}


def commands() -> list[str]:
    from typer.main import get_command

    from hf_paged.cli import app

    return list(get_command(app).commands)


def test_there_are_pages():
    assert len(PAGES) > 15


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT.resolve()), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        if anchor:
            assert anchor in anchors(target), f"{target.name} has no heading for {link}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_included_files_exist(path):
    assert all((path.parent / included).is_file() for included in _INCLUDE.findall(read(path)))


def test_every_page_is_in_the_contents():
    contents = "".join(re.findall(r"```\{toctree\}(.*?)```", read(DOCS / "index.md"), re.DOTALL))
    listed = re.findall(r"^[a-z-]+$", contents, re.MULTILINE)
    assert sorted(listed) == sorted({path.stem for path in PAGES} - EXTRA_PAGES)


@pytest.mark.parametrize("module", [hf_paged, capacity], ids=lambda module: module.__name__)
def test_the_whole_interface_is_in_the_reference(module):
    told = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (?:[\w.]*\.)?(\w+)", read(DOCS / "api.md"), re.MULTILINE))
    assert set(module.__all__) <= told


def test_readme_has_its_test_command():
    assert 'pip install -e ".[test]" && pytest' in read(ROOT / "README.md")


def test_readme_is_short():
    assert len(read(ROOT / "README.md").split()) < 1200
