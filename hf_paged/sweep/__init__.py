"""Every model class that transformers maps to generate(), tiny and random, run with a PagedCache, without, and batched.

`python -m hf_paged.sweep` runs all of them and writes `patches/MODELS.md`.
"""
