"""Keeping a model enabled while batchers on it are open."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from transformers import PreTrainedModel

from hf_paged.patches.enable import borrow


class Enabler:
    """Keeps a model enabled until it is closed; the last of several on a model leaves it as the first has found it, or
    as the user has wanted it since.

    The garbage collector may close one while this very thread has the lock. So whoever closes one hands it over, and
    whoever has the lock, or gets it, does the rest.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _handed_over: ClassVar[deque[Enabler]] = deque()

    def __init__(self, model: PreTrainedModel) -> None:
        self._give_back: Callable[[], None] | None = None
        try:
            with self._lock:
                self._give_back = borrow(model)
        finally:
            self._close_all()

    def close(self) -> None:
        """Harmless twice."""
        self._handed_over.append(self)
        self._close_all()

    @classmethod
    def _close_all(cls) -> None:
        while cls._handed_over and cls._lock.acquire(blocking=False):
            try:
                while cls._handed_over:
                    cls._handed_over.popleft()._close()
            finally:
                cls._lock.release()

    def _close(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
