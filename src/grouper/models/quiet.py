"""Calls of transformers and PEFT without their bars and warnings, one thread at a time."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

# transformers replaces functions of PyTorch while it makes a model, and a model that another thread
# makes meanwhile would be left without weights. Bars, warnings and the random generator belong to
# the whole process, too.
_ALONE = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, and warnings about calls between other libraries."""
    with _ALONE, warnings.catch_warnings():
        was_on = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        # PEFT asks transformers in a way that transformers will drop; neither is ours.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            yield
        finally:
            if was_on:
                transformers_logging.enable_progress_bar()
