"""Is this machine ready? Versions, devices, which kernels will run and why, whether they are right, what is missing.

    diagnosis = run_doctor()
    diagnosis.passed, [finding for finding in diagnosis.findings if finding.advice]

`findings` says what a finding is; `environment` looks around, `backends` asks which kernels serve which device,
`correctness` compares them with attention in float64 and a whole model with the ordinary cache; `report` shows it all,
as `hf-paged doctor` does.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_paged.doctor import backends, correctness, environment
from hf_paged.doctor.findings import Diagnosis, Finding, Status

__all__ = ["Diagnosis", "Finding", "Status", "run_doctor"]

SECTIONS: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
    ("versions", environment.check_versions),
    ("devices", environment.check_devices),
    ("kernels", backends.check_backends),
    ("correctness", correctness.check_kernels),
    ("whole model", correctness.check_models),
    ("surroundings", environment.check_surroundings),
    ("optional packages", environment.check_extras),
)


def run_doctor(progress: Callable[[str], object] | None = None) -> Diagnosis:
    """Look at everything. Takes seconds, or half a minute where kernels are compiled for the first time.

    A part that raises is a finding, too; nothing is raised.

    Args:
        progress: told which part comes next.
    """
    found: dict[str, tuple[Finding, ...]] = {}
    for name, check in SECTIONS:
        if progress:
            progress(f"checking {name}")
        try:
            found[name] = tuple(check())
        except Exception as error:  # whatever a broken installation raises
            advice = "please report this with the output of `hf-paged doctor --json`"
            found[name] = (Finding(name, Status.failed, f"{type(error).__name__}: {error}", advice),)
    return Diagnosis(found)
