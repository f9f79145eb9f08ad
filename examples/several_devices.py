"""Many prompts on a model that is spread over all devices there are, by accelerate's device_map.

    python examples/several_devices.py --model org/model

Each layer's blocks are on its layer's device. Where there is one GPU, layers that do not fit stay in the CPU's memory.
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged import BlockPool, generate_many

PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,", "def add(a, b):", "Water boils at"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", device_map="auto").eval()
    pool = BlockPool(num_blocks=1024)
    results = generate_many(
        model, PROMPTS, tokenizer=tokenizer, max_new_tokens=options.max_new_tokens, do_sample=False, pool=pool
    )
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"{prompt!r} -> {result.text!r}")
    places = sorted({str(storage.device) for storage in pool.storages.values()})
    print(f"weights: {getattr(model, 'hf_device_map', model.device)}; blocks on {', '.join(places)}")


if __name__ == "__main__":
    main()
