"""`hf-paged doctor`."""

from __future__ import annotations

from hf_paged.cli.main import app, examples
from hf_paged.cli.options import JsonOption
from hf_paged.cli.running import mendable_errors, progress_line, show


@app.command(
    epilog=examples(
        "hf-paged doctor",
        "hf-paged doctor --json",
        "HF_PAGED_BACKEND=reference hf-paged doctor",
    )
)
def doctor(as_json: JsonOption = False) -> None:
    """Check whether this machine is ready, in seconds.

    Looked at are versions, devices and their memory, which kernels will run on each device and why, environment
    variables and packages that are known to stand in the way, and what is not installed. Every kernel that runs here is
    compared with attention in float64, and a tiny model's answers with those of the ordinary cache.

    Each line is ok, a note, a warning or failed, with what to do; where one has failed the exit code is 1.
    """
    with mendable_errors(), progress_line() as progress:
        progress("loading torch and transformers")
        from hf_paged.doctor import run_doctor
        from hf_paged.doctor.report import print_diagnosis

        diagnosis = run_doctor(progress)
    show(diagnosis, print_diagnosis, as_json)
