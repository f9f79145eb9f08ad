"""Pictures of a pool, its block tables, and what became of them: as text, as HTML in a notebook, and with matplotlib.

`draw_pool`, `draw_block_tables` and `draw_mapping` show a cache, a pool or a batcher as it is now; `draw_occupancy` and
`draw_timeline` show what `hf_paged.record` has noted. They return matplotlib's Axes and draw on yours with `ax=`.
matplotlib is imported when the first of them is called: `pip install "hf-paged[notebook]"`.
"""

from hf_paged.pictures.over_time import draw_occupancy, draw_timeline
from hf_paged.pictures.pool import draw_pool
from hf_paged.pictures.tables import draw_block_tables, draw_mapping
from hf_paged.pictures.text import text_map

__all__ = ["draw_block_tables", "draw_mapping", "draw_occupancy", "draw_pool", "draw_timeline", "text_map"]
