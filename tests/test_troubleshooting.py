"""`docs/troubleshooting.md` names every error and warning of ours that a user can meet, and no other.

Messages are read from the source, with `…` where a value is put in. An entry of the page quotes a piece of one, with
`…` where it leaves something out. So a new message fails here until the page tells what to do about it, or until it is
listed below as one that no user meets.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
FOLDERS = ("hf_paged", "kernels", "patches")
GAP = "…"
SHORTEST = 8
"""Letters that an entry has at least, so that it fits no message by chance."""
AS_SHOWN = {"BadParameter": "Invalid value"}  # by typer

NOT_MET = {
    "hf_paged/sweep/": "how two answers differ, told within the sweep and written into its table",
    "hf_paged/bench/gpu/": "reasons why the GPU script leaves a measurement out, written into its results",
}
"""Files whose messages no user meets as errors, and where they go instead."""

INTERNAL = {
    "AssertionError: …": "from BlockAllocator.check, which tests call",
    "RuntimeError: … blocks are held by parked tables alone": "so that a bug in the allocator is no endless loop",
    "ValueError: cannot truncate …": "to the allocator; Rows.crop asks for no length that a table does not have",
    "ValueError: a parked table cannot grow": "to the allocator; Rows unparks a table before it grows",
    "ValueError: cannot grow a table by …": "to the allocator; plans have no negative counts",
    "ValueError: compare needs at least one variant": "to the benchmarks; hf-paged bench allows no other",
    "NotImplementedError: … asks for attention that no kernel expresses": "the reason why a model cannot be batched",
    "NotImplementedError: its masks say more than causal order": "the reason why a model cannot be batched",
    "NotImplementedError: its tokens do not keep to their own sequence": "the reason why a model cannot be batched",
    "NotImplementedError: a packed step's cache can only be updated": "the reason why a model cannot be batched",
    "NotImplementedError: layer … changed the shape of its input": "the reason why a model cannot be batched",
    "NotImplementedError: layer … changes its keys or values": "the reason why a model cannot be batched",
    "NotImplementedError: layer … stores keys and values more than once": "the reason why a model cannot be batched",
    "NotImplementedError: it adds copies of layers to the cache": "the reason why a model cannot be batched",
    "NotImplementedError: it reads keys and values out of the cache": "the reason why a model cannot be batched",
    "NotImplementedError: … attends to keys that are not in the cache": "the reason why a model cannot be batched",
    "NotImplementedError: generate() gives it … that do not follow": "the reason why a model cannot be batched",
}
"""Messages that no user meets, or not by themselves, and why."""


class Message(NamedTuple):
    kind: str
    text: str
    where: str

    def __str__(self) -> str:
        return f"{AS_SHOWN.get(self.kind, self.kind)}: {self.text}"


def template(node: ast.expr | None, constants: dict[str, ast.expr]) -> str:
    """The text of an expression, with a gap for each part that is not known before the program runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part, constants) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left, constants) + template(right, constants)
        case ast.Name(id=name) if name in constants:
            return template(constants[name], constants)
        case ast.FormattedValue(value=ast.Name(id=name)) if name in constants:
            return template(constants[name], constants)
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            return re.sub(r"\{[^}]*\}", GAP, template(text, constants))
    return GAP


def messages_of(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    name = path.relative_to(ROOT).as_posix()

    def visit(node: ast.AST, class_name: str | None) -> Iterator[Message]:
        if isinstance(node, ast.ClassDef):
            class_name = node.name
        if isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func)
            kind = function.rpartition(".")[2]
            if function == "super().__init__" and class_name and class_name.endswith("Error"):
                kind = class_name
            elif function in ("logger.warning", "warnings.warn"):
                kind = "warning"
            elif not (kind.endswith("Error") or kind in ("Exception", "BadParameter")):
                kind = ""
            if kind:
                text = template(node.args[0], constants)
                if kind == "warning":
                    text = re.sub(r"%[sd]", GAP, text)
                yield Message(kind, re.sub(r"\s+", " ", text).strip(), f"{name}:{node.lineno}")
        for child in ast.iter_child_nodes(node):
            yield from visit(child, class_name)

    yield from visit(tree, None)


MESSAGES = [
    message
    for folder in FOLDERS  # rglob does not follow hf_paged/kernels and hf_paged/patches, which are links to the others
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(tuple(NOT_MET))
    for message in messages_of(path)
    if re.search("[a-z]{2}", message.text)  # else it is only handed on
]
ENTRIES = re.findall(r"`((?:\w+Error|Invalid value|warning): [^`]+)`", PAGE.read_text(encoding="utf-8"))


def fits(entry: str, message: Message) -> bool:
    return re.match(".*".join(map(re.escape, entry.split(GAP))), str(message)) is not None


def test_messages_are_found():
    texts = [str(message) for message in MESSAGES]
    assert len(texts) > 120
    assert any(text.startswith("OutOfBlocksError: this step needs … more block… of … tokens") for text in texts)
    assert any(text.startswith("RuntimeError: …the forward pass before this one stopped") for text in texts)  # constant
    assert any(text.startswith("NotImplementedError: … cannot be batched continuously") for text in texts)  # returned
    assert any(text.startswith("warning: … decodes without torch.compile") for text in texts)


def test_every_message_has_an_entry():
    missing = [m for m in MESSAGES if not any(fits(entry, m) for entry in [*ENTRIES, *INTERNAL])]
    assert not missing, "\n".join(
        ["docs/troubleshooting.md does not tell what to do about", *(f"{m.where}: {m}" for m in missing)]
    )


def test_every_entry_is_a_message():
    stale = [entry for entry in [*ENTRIES, *INTERNAL] if not any(fits(entry, message) for message in MESSAGES)]
    assert not stale, f"there are no such messages any more: {stale}"


def test_entries_say_enough():
    assert not [entry for entry in ENTRIES if len(re.findall("[a-z]", entry.partition(": ")[2])) < SHORTEST]


def test_no_entry_stands_twice():
    assert len(ENTRIES) == len(set(ENTRIES))


def test_folders_that_are_left_out_exist():
    assert all(list((ROOT / folder).glob("*.py")) for folder in NOT_MET)
