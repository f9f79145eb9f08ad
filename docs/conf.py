"""The documentation site: `sphinx-build -nW --keep-going docs docs/_build`.

Pages are Markdown that also reads well on a git host. Some of them include files that stand elsewhere in the
repository, so that nothing is told twice. Links are therefore written as paths in the repository, relative to the file
that they stand in; here they become links to the page that shows the file, or else to a copy of it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from hf_paged import __version__  # noqa: E402
from hf_paged.cli import app as command_line  # noqa: E402

project = "hf-paged"
author = "the hf-paged authors"
copyright = "the hf-paged authors; Apache-2.0"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
nitpicky = True
# What is not ours is not looked up: that would need the network.
nitpick_ignore_regex = [(r"py:.*", r"(?!hf_paged\b).*"), (r"py:.*", r"hf_paged\.(?!__init__).*\._.*")]

html_theme = "furo"
html_title = f"hf-paged {__version__}"
html_copy_source = html_show_sourcelink = False

myst_heading_anchors = 3  # those that git hosts give, too
smartquotes = False  # options begin with two hyphens

default_role = "py:obj"  # `PagedCache` in a docstring is a link; what names nothing of ours stays as it is
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

INCLUDED = {
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "kernels/README.md": "kernels.md",
    "kernels/TRITON.md": "triton.md",
    "patches/COMPILE.md": "compile.md",
    "patches/GENERATE.md": "generate.md",
    "patches/MODELS.md": "models.md",
}
"""Files that are pages here."""
COMMANDS = "<!-- commands -->"
"""Where `command-line.md` wants the description of every command."""

_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]+)?(?=\))")
_CODE_AND_MORE = re.compile(r"(`+)(.+?)\1(\w)?", re.DOTALL)
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def with_links(text: str, source: Path) -> str:
    """The Markdown of the file `source` with links that hold in a page of this site."""

    def replace(found: re.Match) -> str:
        path = Path(os.path.normpath(source.parent / found[1]))
        page = INCLUDED.get(path.relative_to(ROOT).as_posix())
        return (page or os.path.relpath(path, DOCS)) + (found[2] or "")

    # Links around code keep their ends outside of it, so these pieces can be left out.
    return "".join(part if _CODE.fullmatch(part) else _LINK.sub(replace, part) for part in _CODE.split(text))


def describe_commands() -> Iterator[str]:
    """Every command of the command line in Markdown, as its `--help` has it."""
    group: Any = typer.main.get_command(command_line)
    with group.make_context("hf-paged", [], resilient_parsing=True) as parent:
        for name in group.list_commands(parent):
            command = group.get_command(parent, name)
            if command.hidden:
                continue
            with command.make_context(name, [], parent=parent, resilient_parsing=True) as context:
                usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
                yield f"## {name}\n\n{command.help}\n\n```text\n{usage}\n```\n\n| option | |\n|---|---|\n"
                for parameter in command.get_params(context):
                    if record := parameter.get_help_record(context):
                        option, text = (part.replace("|", "\\|") for part in record)
                        option = re.sub(r"<(int|float)( range)?>", "N", option).replace("<file>", "FILE")
                        yield f"| `{re.sub(' <(str|bool)>', '', option)}` | {text} |\n"
                examples = re.findall(r"`([^`]+)`", command.epilog or "")
                yield "\n" + "\n".join(["Examples:\n\n```bash", *examples, "```\n\n"] if examples else [])


def read_page(app: Sphinx, name: str, content: list[str]) -> None:
    source = DOCS / f"{name}.md"
    text = with_links(content[0], source)
    if name == "command-line":
        assert COMMANDS in text, f"{source} has lost its line {COMMANDS}"
        text = text.replace(COMMANDS, "".join(describe_commands()))
    content[0] = text


def read_included(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    content[0] = with_links(content[0], Path(os.path.normpath(DOCS / path)))


def read_docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings have Markdown's fences, and letters after code, as in `Request`s."""

    def replace(found: re.Match) -> str:
        body = found[3].replace("\n", "\n    ").rstrip()
        return f"{found[1]}.. code-block:: {found[2] or 'text'}\n\n    {body}\n"

    text = _FENCED.sub(replace, "\n".join(lines))
    lines[:] = _CODE_AND_MORE.sub(space_after_code, text).split("\n")


def space_after_code(found: re.Match) -> str:
    return f"{found[1]}{found[2]}{found[1]}" + (f"\\ {found[3]}" if found[3] else "")


def keep_attribute(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon for the type of an attribute. Ours have types in the code, and colons
    in their sentences; so theirs are kept from it."""
    if what in ("attribute", "data", "property"):
        app.env.temp_data[f"docstring of {name}"] = list(lines)


def give_back_attribute(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    if (kept := app.env.temp_data.pop(f"docstring of {name}", None)) is not None:
        lines[:] = kept


def mend_source_links(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """From the code of a module that has things under several names, such as `hf_paged.record` of
    `hf_paged.recording`, Sphinx links to all of them under the first."""
    known = app.env.domains["py"].objects
    module = page.removeprefix("_modules/").replace("/", ".")

    def replace(found: re.Match) -> str:
        parts = found[2].split(".")
        names = [found[2], *(".".join([module, *parts[start:]]) for start in range(1, len(parts)))]
        return found[1] + next((name for name in names if name in known), found[2])

    if page.startswith("_modules/hf_paged"):
        context["body"] = re.sub(r"(api\.html#)([\w.]+)", replace, context["body"])


def always_read(app: Sphinx, *args: Any) -> list[str]:
    return ["command-line", "api"]  # these follow the code


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("autodoc-process-docstring", keep_attribute, priority=400)  # napoleon is at 500
    app.connect("autodoc-process-docstring", give_back_attribute, priority=600)
    app.connect("autodoc-process-docstring", read_docstring, priority=700)
    app.connect("env-get-outdated", always_read)
    app.connect("html-page-context", mend_source_links)
