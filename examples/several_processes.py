"""Many prompts over several processes, each with a model of its own.

On GPUs, one process for each:

    accelerate launch --num_processes 2 examples/several_processes.py

On a CPU (`accelerate launch --cpu` starts one process only):

    torchrun --standalone --nproc_per_node 2 examples/several_processes.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator

from hf_paged.batching.parallel import generate_across
from hf_paged.models import load_model

PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,", "def add(a, b):", "Water boils at"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="hub id or folder; the demo model otherwise")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    with accelerator.main_process_first():  # which converts the demo model, the first time
        model, tokenizer = load_model(options.model, device=accelerator.device)
    results = generate_across(
        model,
        PROMPTS,
        tokenizer=tokenizer,
        max_new_tokens=options.max_new_tokens,
        do_sample=True,
        seed=0,
        max_memory=0.2,
    )
    if accelerator.is_main_process:  # every process has all results
        for prompt, result in zip(PROMPTS, results, strict=True):
            print(f"{result.index}  {prompt!r} -> {result.text!r}")
        print(f"{len(results)} prompts in {accelerator.num_processes} processes")
    accelerator.end_training()


if __name__ == "__main__":
    main()
