"""`python -m hf_paged` is `hf-paged`."""

from hf_paged.cli import app

app(prog_name="hf-paged")
