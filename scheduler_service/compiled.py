"""How loops are compiled: with numba, outside the interpreter lock, and kept on disk between processes.

A service that plans on a thread stays responsive because compiled loops release the lock.

Loops are put into those that call them: a call hands over every array of a tuple, dozens of words, which took a
quarter of the packing's time.

numba's cache follows the file of the loop alone: after a change of `heaps`, loops in `packing` that call it are
stale until `packing` is touched or __pycache__ removed. An installation writes all files anew, so only developers
meet this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """Compile `loop` on its first call, or load it from numba's cache. Division by zero is not checked for."""
    try:
        return cast(Loop, numba.njit(cache=True, nogil=True, error_model="numpy", forceinline=True)(loop))
    except RuntimeError:
        # numba found no folder that it may write its cache to (read-only image without NUMBA_CACHE_DIR).
        # Compiling in every process costs seconds at start-up; not planning would cost the job.
        return cast(Loop, numba.njit(nogil=True, error_model="numpy", forceinline=True)(loop))
