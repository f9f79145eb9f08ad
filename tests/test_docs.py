"""The pages hold together: links lead somewhere, and nothing is left out. `.ci/run` builds the site of them."""

from __future__ import annotations

import copy
import re
import runpy
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_paged
import hf_paged.models
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
def test_a_page_has_no_heading_twice(path):
    headings = re.findall(r"^## (.+)$", re.sub(r"^```.*?^```$", "", read(path), flags=re.M | re.S), re.MULTILINE)
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_included_files_exist(path):
    assert all((path.parent / included).is_file() for included in _INCLUDE.findall(read(path)))


def test_links_from_code_lead_to_the_names_of_the_reference():
    pytest.importorskip("sphinx")
    conf = runpy.run_path(str(DOCS / "conf.py"))
    objects = {"hf_paged.record", "hf_paged.recording.Recording", "hf_paged.recording.Recording.steps"}
    app = SimpleNamespace(env=SimpleNamespace(domains={"py": SimpleNamespace(objects=objects)}))
    context = {"body": "".join(f'<a href="../../api.html#hf_paged.{n}">' for n in ("record", "Recording.steps", "No"))}
    conf["mend_source_links"](app, "_modules/hf_paged/recording", "page.html", context, None)
    names = re.findall('#([^"]+)', context["body"])
    assert names == ["hf_paged.record", "hf_paged.recording.Recording.steps", "hf_paged.No"]


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


EXAMPLES = [path for path in FILES if re.search(r"^```python$", read(path), re.MULTILINE)]


def tokenizer_of_letters() -> PreTrainedTokenizerFast:
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    vocabulary = {token: index for index, token in enumerate(["<end>", *letters])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_run(path, tiny_llama, monkeypatch):
    """A page's examples, one after the other, with a tiny model in place of the reader's."""
    model, tokenizer = copy.deepcopy(tiny_llama), tokenizer_of_letters()
    monkeypatch.setattr(hf_paged.models, "load_demo_model", lambda: (model, tokenizer))
    prompts = ["One", "A longer one"]
    inputs = dict(tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")) | {"max_new_tokens": 5}
    names = {name: getattr(hf_paged, name) for name in hf_paged.__all__}
    names |= {"model": model, "tokenizer": tokenizer, "prompts": prompts, "inputs": inputs, "batch": inputs}
    names |= {"chat": [{"role": "user", "content": "Hello"}], "streamer": None}
    names["cache"] = hf_paged.PagedCache(model.config, num_blocks=64)
    for example in re.findall(r"^```python\n(.*?)^```$", read(path), re.MULTILINE | re.DOTALL):
        exec(compile(example, str(path), "exec"), names)
