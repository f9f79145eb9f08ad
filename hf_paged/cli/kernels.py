"""`hf-paged kernels`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from hf_paged.cli.main import app, examples
from hf_paged.cli.options import JsonOption
from hf_paged.cli.running import CHECK_FAILED, mendable_errors, print_json, progress_line


@app.command(
    epilog=examples(
        "hf-paged kernels",
        "hf-paged kernels --target sm_90 --markdown",
        "hf-paged kernels --all --faults",
    )
)
def kernels(
    every: Annotated[
        bool, typer.Option("--all", help="All configurations, a quarter of an hour on two cores, not the main ones.")
    ] = False,
    target: Annotated[
        list[str] | None, typer.Option(help="This target only, such as sm_90; may be repeated.", show_default="all")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="This kernel only, such as decode; may be repeated.", show_default="all")
    ] = None,
    faults: Annotated[bool, typer.Option("--faults", help="Show only what does not hold.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compile so many at a time.", show_default="cores")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile the GPU kernels for six targets, without a GPU, and check what comes out.

    Registers, spills, shared memory, load widths and matrix instructions are facts of the compiler; the issue slots
    that decode needs at full memory speed are a model. Nothing is measured. What was compiled before is remembered.
    """
    with mendable_errors(), progress_line() as progress:
        progress("loading Triton")
        try:
            import triton  # noqa: F401
        except ImportError as error:
            raise NotImplementedError(f"Triton cannot be imported ({error}); pip install triton") from error
        from hf_paged.kernels import static_guard

        cases = static_guard.all_cases() if every else static_guard.main_cases()
        for option, chosen, attribute in (("--target", target, "target"), ("--kernel", kernel, "kernel")):
            known = sorted({getattr(case, attribute) for case in cases})
            if unknown := [name for name in chosen or () if name not in known]:
                raise typer.BadParameter(f"'{unknown[0]}' is not among {', '.join(known)}", param_hint=f"'{option}'")
            cases = [case for case in cases if not chosen or getattr(case, attribute) in chosen]
        if missing := static_guard.missing_tool(cases):
            raise NotImplementedError(missing)
        with progress.bar("compiling", len(cases)) as advance:
            outcomes = static_guard.run(cases, jobs, advance)
    results = [(case, facts, static_guard.verdict(case, facts)) for case, facts in zip(cases, outcomes, strict=True)]
    failed = [result for result in results if result[2]]
    shown = failed if faults else results
    if as_json:
        print_json({"passed": not failed, "kernels": [static_guard.as_dict(*result) for result in shown]})
    elif markdown:
        typer.echo(static_guard.markdown(static_guard.table_row(*result) for result in shown))
    else:
        static_guard.print_table(shown, Console())
    if failed:
        raise typer.Exit(CHECK_FAILED)
