"""How do independent pieces of work share the cores? Each runs on one core from start to end.

The usual way, every operation spread over all cores, makes them wait for each other after each: with two threads 64
products of 256 x 256 x 256 reach 157 GFLOP/s on two cores that reach 227 in one large product.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Piece = TypeVar("Piece")


def spread(run: Callable[[Piece], None], pieces: Sequence[Piece], threads: int) -> None:
    """`run` every piece, at most so many at once, each of one thread. `threads` is torch's number of them.

    Nothing is recorded for autograd, whose state belongs to a thread. Raises what `run` raises.
    """

    def unrecorded(piece: Piece) -> None:
        with torch.no_grad():
            run(piece)

    if threads == 1 or len(pieces) < 2:
        list(map(unrecorded, pieces))
    else:
        list(workers(threads, os.getpid()).map(unrecorded, pieces))


@lru_cache(maxsize=1)
def workers(threads: int, _process: int) -> ThreadPoolExecutor:
    """So many workers for which torch has one thread. A forked child needs its own: threads do not survive a fork."""
    started = threading.Barrier(threads)
    pool = ThreadPoolExecutor(threads, "smelt-experts", alone)
    list(pool.map(lambda _: started.wait(), range(threads)))
    torch.set_num_threads(threads)
    return pool


def alone() -> None:
    """One thread for whatever this worker calls. The setting is the thread's own, but the default of threads yet to
    begin goes with it; `workers` puts that back. A thread takes the default when it first asks."""
    torch.get_num_threads()
    torch.set_num_threads(1)
