"""Everything that is measured on a GPU, in one run: correctness, kernels, and generate() of a whole model.

    python -m hf_paged.bench.gpu [--output DIR] [--toy] [--only decode,prefill] [--budget SECONDS]

It needs no model files and no network. Each result is printed and written to `DIR/gpu.json` as soon as it is known;
`DIR/gpu.md` is a table of all of them. A measurement that fails is recorded with its error, and the run goes on: the
measuring is done by a process of its own, which is started again behind the measurement that broke the device or the
process. `--toy` runs all of it at toy size on a CPU in Triton's interpreter, to show that it runs to its end.

The exit code is 0, or 1 if a correctness case failed or anything of this project raised an error, or 2 where there is
no CUDA device. Peers that are absent or refuse are recorded as skipped, with the reason.

The sections of the report have a file each: `machine`, `compile`, `correctness` (its inputs are in `cases`), `decode`
(with the sweep), `blocks`, `prefill`, `generate`. `peers` is what decode and prefill are compared with, `layers` the
keys and values that they are timed on. `sizes` says how large everything is; `device` has the clock, CUDA graphs and
memory; `recorder` runs a measurement within its time and keeps what became of it; `results` tells it in lines and
tables. `__main__` is the command line, `supervisor` watches over the process that measures, which is `worker`.
"""
