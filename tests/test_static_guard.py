"""What the compiler makes of the Triton kernels, for targets that are not here; and that the guard sees faults."""

import io

import pytest

pytest.importorskip("triton")
from hf_paged.kernels import static_guard
from hf_paged.kernels.static_facts import DEVICES, Case, Facts
from hf_paged.kernels.static_guard import all_cases, main_cases, run, verdict
from hf_paged.kernels.triton_config import Config


def check(cases):
    found = {str(case): verdict(case, facts) for case, facts in zip(cases, run(cases), strict=True)}
    assert not {case: faults for case, faults in found.items() if faults}


def test_the_main_configurations_hold():
    check(main_cases())


@pytest.mark.slow
def test_every_configuration_holds():
    """A quarter of an hour on two cores."""
    check(all_cases())


def test_the_main_configurations_are_of_every_target_and_kernel():
    cases = main_cases()
    assert {case.target for case in cases} == set(DEVICES)
    assert {case.kernel for case in cases} == {"decode", "prefill", "combine", "write", "copy"}
    assert set(cases) <= set(all_cases())


PLANTED = [
    (Case("decode", "sm_90", skew=1), "loads of 16 bytes"),
    (Case("decode", "sm_90", skew=4), "less than 16 bytes"),
    (Case("decode", "gfx942", skew=1), "loads of 16 bytes"),
    (Case("decode", "sm_90", config=Config(16, 64, 2, 1)), "buffer of keys and values"),
    (Case("decode", "sm_90", config=Config(16, 16, 4, 3)), "warp instructions a token"),
    (Case("decode", "sm_100", config=Config(16, 16, 8, 3)), "issue slots at full memory speed"),
    (Case("prefill", "sm_90", config=Config(32, 32, 4, 3)), "no wgmma"),
    (Case("prefill", "sm_80", dtype="fp32", config=Config(64, 64, 4, 2)), "spills"),
    (Case("prefill", "gfx942", key_dim=256, config=Config(128, 64, 4, 2)), "spills"),
    (Case("prefill", "sm_120", config=Config(128, 64, 8, 5)), "bytes of shared memory"),
]


IMPOSSIBLE = Case("decode", "sm_90", config=Config(16, 8, 4, 2))  # a product's sides are 16 at least


@pytest.fixture(scope="module")
def planted():
    """Facts of the planted faults, and of what does not compile: together, since each worker takes seconds to start."""
    return run([*(case for case, _ in PLANTED), IMPOSSIBLE])


@pytest.mark.parametrize("index", range(len(PLANTED)), ids=[words for _, words in PLANTED])
def test_a_planted_fault_is_found(planted, index):
    case, words = PLANTED[index]
    found = verdict(case, planted[index])
    assert any(words in fault for fault in found), found


def test_what_needs_no_matrix_unit_is_not_asked_for_one():
    case = Case("decode", "sm_90")
    good = run([case])[0]
    assert verdict(case, good) == []
    assert "no matrix instructions" in verdict(case, Facts(**{**vars(good), "matrix": {}}))
    assert verdict(Case("write", "sm_90"), Facts("", warps=4)) == []


def test_the_pipeline_and_the_products_are_what_they_are_said_to_be():
    """The figures that the kernels were written for: a published paged kernel needs 54.8 instructions, one buffer."""
    sm_90, wide, prefill = run(
        [Case("decode", "sm_90"), Case("decode", "sm_90", block_size=64), Case("prefill", "sm_90")]
    )
    assert sm_90.per_token <= 27 and sm_90.buffers >= 2 and sm_90.issue_share <= 0.25
    assert wide.per_token <= 22
    assert "HGMMA" in prefill.matrix and prefill.spilled == 0


def test_places_where_the_hardware_waits_are_no_loops():
    """Their branches lead back into the loop, from behind the end of the kernel, and make it look short."""
    (facts,) = run([Case("prefill", "sm_100", key_dim=64, group=8, options=("sinks", "window"))])
    assert len(facts.loads) == 1 and facts.loop > 800
    two_loops, one_loop = run([Case("prefill", "sm_90"), Case("decode", "sm_90")])
    assert len(two_loops.loads) == 2 and len(one_loop.loads) == 1


def test_what_was_compiled_is_kept(monkeypatch):
    case = Case("copy", "sm_90")
    before = run([case])
    monkeypatch.setattr(static_guard, "_start_worker", lambda: pytest.fail("compiled again"))
    assert run([case]) == before


def test_other_source_is_compiled_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = static_guard._kept_at("one", Case("copy", "sm_90"))
    assert kept.is_relative_to(tmp_path)
    assert kept != static_guard._kept_at("another", Case("copy", "sm_90"))
    assert kept != static_guard._kept_at("one", Case("copy", "sm_80"))


class Aborted:
    """A worker whose compiler has ended the process."""

    returncode = -6
    stdout = io.StringIO("")

    class stdin:
        write = flush = close = staticmethod(lambda *text: None)

    def poll(self):
        return self.returncode

    wait = kill = poll


def test_a_compiler_that_aborts_is_a_fault_of_its_case_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = static_guard._start_worker
    workers = iter([Aborted()])
    monkeypatch.setattr(static_guard, "_start_worker", lambda: next(workers, None) or start())
    cases = [Case("copy", "sm_90"), Case("copy", "sm_80")]
    first, second = run(cases, jobs=1)
    assert verdict(cases[0], first) == ["the compiler ended with code -6"]
    assert verdict(cases[1], second) == []


def test_a_case_that_does_not_compile_says_why(planted):
    found = verdict(IMPOSSIBLE, planted[-1])
    assert len(found) == 1 and "Error" in found[0]


def test_launching_is_measured_without_a_gpu():
    from hf_paged.bench.launch import measure_launches

    figures = measure_launches()
    assert set(figures) == {"write_us", "decode_us", "decode_split_us"}
    assert all(0.5 < microseconds < 300 for microseconds in figures.values()), figures
