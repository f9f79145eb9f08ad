"""How compiled code starts threads: one C function, `fork`, that runs another in all of them."""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_FORK_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_RUN_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _find_fork() -> tuple[int, Any]:
    """The address of a C function `fork(function, data, threads, flags)` that runs `function(data)` in all threads.

    Torch's OpenMP runtime has exactly this, `GOMP_parallel`: one pool of threads then serves the matrix products and
    the attention between them, any number of Python threads may call it, and numba's layers, one of which is not
    thread-safe, stay out of it. Where torch brings no such function (macOS, Windows) Python threads do the same. The
    second value keeps the function alive.
    """
    try:
        library = ctypes.CDLL(torch._C.__file__)  # a name is looked up in the libraries it is linked with, too
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0, library
    except (AttributeError, OSError):
        callback = _FORK_TYPE(_fork_python_threads)
        return ctypes.cast(callback, ctypes.c_void_p).value or 0, callback


def _fork_python_threads(function: int, data: int, threads: int, flags: int) -> None:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hf_paged")
    run = _RUN_TYPE(function)  # ctypes releases the GIL around it
    helpers = [_pool.submit(run, data) for _ in range(threads - 1)]
    run(data)  # returns when no task is left, so a helper that comes late finds nothing to do
    for helper in helpers:
        helper.result()


FORK, _fork_owner = _find_fork()
