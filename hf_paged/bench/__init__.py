"""Benchmarks: one harness for all of them, and one file for each thing that is measured.

`harness` times variants against each other, `attention` one attention layer, `decode` whole decode steps of a model,
`prefill` the prompts that it reads, `memory` the bytes that a ragged batch takes, `block_sizes` all of these by block
size; `suite` runs them all for `hf-paged bench`.
"""

from hf_paged.bench.harness import Comparison, Machine, Ratio, Timing, compare, describe_machine, measure_read_bandwidth

__all__ = ["Comparison", "Machine", "Ratio", "Timing", "compare", "describe_machine", "measure_read_bandwidth"]
