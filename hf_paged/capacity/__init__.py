"""How many requests fit into memory, worked out from a model's config before any weights are loaded.

    config = AutoConfig.from_pretrained("org/model")
    plan = plan_capacity(footprint_of(config), kv_memory=40 * 10**9, length=500, max_length=8192)
    plan.contiguous.requests, plan.blocks.requests

`footprint` is the arithmetic of one request; `probe` finds a model's figures by running it without memory; `planning`
divides a budget, and `lengths` reads real prompts and answers; `report` shows a plan, as `hf-paged plan` does.
"""

from hf_paged.capacity.footprint import Footprint, GroupFootprint
from hf_paged.capacity.lengths import LengthsError, read_lengths
from hf_paged.capacity.planning import BlockFit, CapacityPlan, Fit, LengthsPlan, MemoryBudget, plan_capacity
from hf_paged.capacity.probe import footprint_of, load_config
from hf_paged.sizes import format_size, parse_size

__all__ = [
    "BlockFit",
    "CapacityPlan",
    "Fit",
    "Footprint",
    "GroupFootprint",
    "LengthsError",
    "LengthsPlan",
    "MemoryBudget",
    "footprint_of",
    "format_size",
    "load_config",
    "parse_size",
    "plan_capacity",
    "read_lengths",
]
