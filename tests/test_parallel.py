"""generate_across: two processes on a CPU give what one gives, and none waits for one that has failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_paged import BatchError, generate_many
from hf_paged.batching.parallel import generate_across
from tests.batching_checks import prompts
from tests.helpers import tiny_model

ROOT = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "num_blocks": 64, "block_size": 4}
ASKED = (5, 30, 9, 17, 2)

SCRIPT = """
import json, sys
from pathlib import Path
from accelerate import PartialState, debug_launcher
from transformers import LogitsProcessor
from hf_paged import BatchError, Request
from hf_paged.batching.parallel import ProcessError, generate_across
from tests.helpers import tiny_model
from tests.batching_checks import prompts
from tests.test_parallel import ASKED, OPTIONS

class Unsendable(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} {other}")

class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise Unsendable("not", "sent")

def told(call):
    try:
        return [(result.index, result.tokens) for result in call()]
    except BatchError as error:
        bad = [(r.index, type(r.error).__name__, str(r.error)) for r in error.results if r.error is not None]
        return ["BatchError", len(error.results), bad]
    except Exception as error:
        return [type(error).__name__, str(error)]

def work(folder):
    state, model, asked = PartialState(cpu=True), tiny_model("llama"), prompts(*ASKED)
    faulty = [*asked[:4], Request(asked[4], logits_processor=[Fails()])]
    refused = [*asked[:4], Request(asked[4], num_beams=3)]
    found = {
        "greedy": told(lambda: generate_across(model, asked, **OPTIONS)),
        "sampled": told(lambda: generate_across(model, asked, do_sample=True, seed=7, **OPTIONS)),
        "samples": told(lambda: generate_across(
            model, asked, do_sample=True, seed=7, num_return_sequences=2, **OPTIONS)),
        "faulty": told(lambda: generate_across(model, faulty, **OPTIONS)),
        "refused": told(lambda: generate_across(model, refused, **OPTIONS)),
        "unequal": told(lambda: generate_across(model, asked[: 3 + state.process_index], **OPTIONS)),
        "few": told(lambda: generate_across(model, asked[:1], **OPTIONS)),
        "none": told(lambda: generate_across(model, [], **OPTIONS)),
        "processes": state.num_processes,
    }
    Path(folder, f"{state.process_index}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    debug_launcher(work, (sys.argv[1],), num_processes=2)
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes was given."""
    folder = tmp_path_factory.mktemp("processes")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(2)]


def test_every_process_has_all_results_in_order(found: list[dict[str, Any]]) -> None:
    model, asked = tiny_model("llama"), prompts(*ASKED)
    assert [process["processes"] for process in found] == [2, 2]
    for name, options in (
        ("greedy", {}),
        ("sampled", {"do_sample": True, "seed": 7}),
        ("samples", {"do_sample": True, "seed": 7, "num_return_sequences": 2}),
    ):
        expected = [[r.index, r.tokens] for r in generate_many(model, asked, **options, **OPTIONS)]
        assert found[0][name] == found[1][name] == expected, name
    assert found[0]["few"] == found[1]["few"] == found[0]["greedy"][:1]
    assert found[0]["none"] == found[1]["none"] == []


def test_a_request_that_fails_is_told_to_all(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["faulty"] == ["BatchError", 5, [[4, "RuntimeError", "Unsendable: not sent"]]]


def test_a_process_that_fails_lets_nobody_wait(found: list[dict[str, Any]]) -> None:
    first, second = (process["refused"] for process in found)
    assert second[0] == "NotImplementedError" and "num_beams=3" in second[1]
    assert first[0] == "ProcessError" and "process 1" in first[1] and "num_beams=3" in first[1]


def test_unequal_prompts_are_refused(found: list[dict[str, Any]]) -> None:
    for process in found:
        assert process["unequal"][0] == "ValueError" and "give all prompts to every process" in process["unequal"][1]


def test_one_process_is_enough() -> None:
    model, asked = tiny_model("llama"), prompts(*ASKED)
    expected = [result.tokens for result in generate_many(model, asked, seed=1, do_sample=True, **OPTIONS)]
    assert [r.tokens for r in generate_across(model, asked, seed=1, do_sample=True, **OPTIONS)] == expected
    with pytest.raises(NotImplementedError, match="num_beams=3"):
        generate_across(model, asked, num_beams=3, **OPTIONS)
    with pytest.raises(TypeError, match="not a str"):
        generate_across(model, "a prompt", **OPTIONS)
    with pytest.raises(BatchError):
        generate_across(model, asked, **(OPTIONS | {"max_new_tokens": 9999}))


def test_processes_that_accelerate_does_not_know_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="cpu=True"):
        generate_across(tiny_model("llama"), [[1, 2]], **OPTIONS)


def test_the_example(tiny_llama_folder: Path) -> None:
    script = ROOT / "examples" / "several_processes.py"
    if not script.parent.is_dir():  # the sdist has the tests without them; a checkout never skips
        pytest.skip("examples are not part of this distribution")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    command += ["--model", str(tiny_llama_folder), "--max-new-tokens", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[0] for line in lines[:5]] == list("01234") and lines[5] == "5 prompts in 2 processes"
