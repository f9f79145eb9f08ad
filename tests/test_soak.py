"""`hf-paged soak`: a sound batch passes, and what is planted is found."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_paged.batching.batcher import ContinuousBatcher
from hf_paged.batching.handle import RequestHandle
from hf_paged.batching.scheduler import Scheduler
from hf_paged.bench import soak
from hf_paged.bench.soak import SoakOptions, SoakResult, run_soak
from hf_paged.bench.soak_load import Listener
from hf_paged.cli import app
from tests.helpers import tiny_model

QUICK = SoakOptions(minutes=0.012, block_size=4, checks=3, patience=0.5)
SOUND = replace(QUICK, minutes=0.025, patience=30.0)


def run(family: str = "llama", **options: object) -> SoakResult:
    return run_soak(tiny_model(family), replace(QUICK, **options))


@pytest.mark.parametrize("family", ("llama", "gemma2"))
def test_a_sound_batch_passes(family: str) -> None:
    said: list[str] = []
    result = run_soak(tiny_model(family), replace(SOUND, checks=8), progress=said.append)
    assert result.passed, result.problems
    assert result.checked == 8
    stats, outcomes = result.stats, result.outcomes
    assert {"length", "failed as planned", "cancelled"} <= outcomes.keys()
    assert stats.peak_running > 1 and stats.preemptions and stats.cached_tokens and stats.used_blocks == 0
    assert result.new_tokens > 100 and result.tokens_per_second > 0
    assert result.latency.keys() == {"first token", "whole request", "each further token"}
    for percentiles in result.latency.values():
        assert 0 < percentiles["p50"] <= percentiles["p90"] <= percentiles["p99"] <= percentiles["max"]
    assert said[0] == "warming up" and any("to go" in text for text in said)
    assert json.loads(json.dumps(result.as_dict()))["passed"] is True


def test_other_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = RequestHandle._take
    monkeypatch.setattr(RequestHandle, "_take", lambda self, token: take(self, token if self.num_tokens else 7))
    result = run()
    assert any("differs from generate()" in problem for problem in result.problems)


def test_a_block_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release, lost = Scheduler._release, []

    def lose_one(self: Scheduler, sequence: object) -> None:
        if lost or not sequence.num_stored:
            release(self, sequence)
        else:
            lost.append(sequence)

    monkeypatch.setattr(Scheduler, "_release", lose_one)
    result = run()
    assert any("blocks are not free" in problem for problem in result.problems)
    assert any("the books are wrong" in problem for problem in result.problems)


def test_a_request_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add, lost = Scheduler.add, []

    def lose_one(self: Scheduler, sequence: object) -> None:
        if sequence.handle.index == 20:
            lost.append(sequence)
        else:
            add(self, sequence)

    monkeypatch.setattr(Scheduler, "add", lose_one)
    result = run()
    assert lost and any("1 requests have not ended" in problem for problem in result.problems), result.problems


def test_a_step_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = ContinuousBatcher._commit

    def fail(self: ContinuousBatcher, *args: object) -> None:
        if self._num_requests > 20:
            raise ZeroDivisionError("planted")
        commit(self, *args)

    monkeypatch.setattr(ContinuousBatcher, "_commit", fail)
    result = run()
    assert any("died of ZeroDivisionError: planted" in problem for problem in result.problems)


def test_a_thread_that_does_not_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, end = threading.Event(), Listener.end

    def hang(self: Listener) -> None:
        end(self)
        if not ends.is_set():
            threading.Thread(target=ends.wait, args=(30,), name="planted").start()

    monkeypatch.setattr(Listener, "end", hang)
    monkeypatch.setattr(soak, "THREADS_END_WITHIN", 0.2)
    try:
        result = run()
    finally:
        ends.set()
    assert any("threads are left: planted" in problem for problem in result.problems)


def test_memory_that_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held, commit = [], ContinuousBatcher._commit

    def grow(self: ContinuousBatcher, *args: object) -> None:
        held.append(b"x" * (1 << 20))
        commit(self, *args)

    monkeypatch.setattr(ContinuousBatcher, "_commit", grow)
    result = run(memory_growth=8 << 20)
    assert any("memory grew by" in problem for problem in result.problems)


def test_failures_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    end = RequestHandle._end
    monkeypatch.setattr(RequestHandle, "_end", lambda self, reason, error=None: end(self, "length", None))
    result = run()
    assert any("tokens of" in problem for problem in result.problems)


def test_the_command(tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})
    options = ["soak", "--model", str(tiny_llama_folder), "--minutes", "0.01", "--seed", "3", "--checks", "2"]
    shown = runner.invoke(app, options)
    assert shown.exit_code == 0, shown.output
    for expected in ("failed as planned", "preemptions", "found in blocks", "p99", "✓ Every request ended"):
        assert expected in shown.output, expected

    take = RequestHandle._take
    monkeypatch.setattr(RequestHandle, "_take", lambda self, token: take(self, token if self.num_tokens else 7))
    failed = runner.invoke(app, [*options, "--json"])
    assert failed.exit_code == 1
    result = json.loads(failed.stdout)
    assert result["passed"] is False and result["options"]["seed"] == 3 and result["stats"]["new_tokens"] > 0
    assert any("differs from generate()" in problem for problem in result["problems"])


def test_a_pool_that_holds_no_request_is_refused(tiny_llama_folder: Path) -> None:
    result = CliRunner().invoke(app, ["soak", "--model", str(tiny_llama_folder), "--blocks", "3"])
    assert result.exit_code == 2 and "--blocks" in result.output
