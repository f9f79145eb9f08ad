"""The process that runs classes: gets them as JSON on standard input, and writes a line of JSON for each."""

from __future__ import annotations

import contextlib
import json
import os
import sys


def main() -> None:
    """Run what standard input asks for."""
    batch = json.load(sys.stdin)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    from hf_paged.sweep.check import check

    logging.set_verbosity_error()
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for pair in batch:
            print(json.dumps(check(*pair).as_dict()), file=out, flush=True)


if __name__ == "__main__":
    main()
