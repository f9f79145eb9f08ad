"""Pictures of a pool, as text and as HTML in a notebook."""

from hf_paged.pictures.text import text_map

__all__ = ["text_map"]
