"""A paged KV cache for Hugging Face transformers.

from hf_paged import PagedCache, enable_paged_attention

enable_paged_attention(model)
model.generate(**inputs, past_key_values=PagedCache(model.config))
"""

from hf_paged._layout import check_layout

check_layout()

import hf_paged.attention  # noqa: E402, F401  (registers the attention function)
from hf_paged.batching.batcher import ContinuousBatcher  # noqa: E402
from hf_paged.batching.many import NewToken, generate_many, iterate_many  # noqa: E402
from hf_paged.batching.requests import (  # noqa: E402
    BatchError,
    GenerationResult,
    QueueFullError,
    Request,
    RequestTooLongError,
)
from hf_paged.batching.stats import BatcherStats  # noqa: E402
from hf_paged.cache import PagedCache  # noqa: E402
from hf_paged.errors import OutOfBlocksError  # noqa: E402
from hf_paged.kernels.select import use_backend  # noqa: E402
from hf_paged.masks import IMPLEMENTATION  # noqa: E402
from hf_paged.patches.enable import (  # noqa: E402
    disable_paged_attention,
    enable_paged_attention,
    paged_attention,
)
from hf_paged.patches.linears import PackReport, pack_linears, packed_linears, unpack_linears  # noqa: E402
from hf_paged.pool import BlockPool  # noqa: E402
from hf_paged.recording import record  # noqa: E402
from hf_paged.stats import CacheStats  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATION",
    "BatchError",
    "BatcherStats",
    "BlockPool",
    "CacheStats",
    "ContinuousBatcher",
    "GenerationResult",
    "NewToken",
    "OutOfBlocksError",
    "PackReport",
    "PagedCache",
    "QueueFullError",
    "Request",
    "RequestTooLongError",
    "disable_paged_attention",
    "enable_paged_attention",
    "generate_many",
    "iterate_many",
    "pack_linears",
    "packed_linears",
    "paged_attention",
    "record",
    "unpack_linears",
    "use_backend",
]
