"""Keeping a model enabled while batchers on it are open."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import ClassVar

from transformers import PreTrainedModel

from hf_paged.patches.enable import enable_paged_attention, is_enabled, undo_enable


class Enabler:
    """Keeps a model enabled until it is closed; the last of several on a model leaves it as the first has found it.

    The garbage collector may close one while this very thread has the lock. So whoever closes one hands it over, and
    whoever has the lock, or gets it, does the rest.
    """

    _open: ClassVar[weakref.WeakKeyDictionary[PreTrainedModel, int]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _handed_over: ClassVar[deque[Enabler]] = deque()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        try:
            with self._lock:
                self._counts = model in self._open or not is_enabled(model)
                enable_paged_attention(model)
                if self._counts:
                    self._open[model] = self._open.get(model, 0) + 1
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
        if self._counts:
            self._counts = False
            self._open[self._model] -= 1
            if not self._open[self._model]:
                del self._open[self._model]
                undo_enable(self._model)
