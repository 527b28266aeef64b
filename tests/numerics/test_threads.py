"""Does work spread over threads run once each, on one core each, and leave everything else as it was?"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from smelt_budget.model.threads import spread

THREADS = 3


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_every_piece_runs_once_with_one_thread_and_nothing_recorded():
    met = threading.Barrier(THREADS, timeout=30)
    seen = []

    def run(piece: int) -> None:
        met.wait()  # only if so many run at once does anyone pass
        product = torch.ones(2, requires_grad=True) * piece
        seen.append((piece, torch.get_num_threads(), product.requires_grad))

    spread(run, range(2 * THREADS), THREADS)
    assert sorted(seen) == [(piece, 1, False) for piece in range(2 * THREADS)]


def test_others_keep_their_threads():
    spread(lambda _: None, range(4), THREADS)
    of_a_new_thread = []
    new = threading.Thread(target=lambda: of_a_new_thread.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert (torch.get_num_threads(), of_a_new_thread) == (THREADS, [THREADS])


@pytest.mark.parametrize("threads", [1, THREADS])
def test_what_a_piece_raises_reaches_the_caller(threads):
    def run(piece: int) -> None:
        if piece == 2:
            raise MemoryError("piece 2")

    with pytest.raises(MemoryError, match="piece 2"):
        spread(run, range(4), threads)
    done = []
    spread(done.append, range(4), threads)
    assert sorted(done) == [0, 1, 2, 3]


def test_a_forked_child_has_workers_of_its_own():
    """As in a data loader: threads do not survive a fork, and a child that waited for the parent's would hang."""
    program = """
import os, torch
from smelt_budget.model.threads import spread
torch.set_num_threads(2)
done = []
spread(done.append, range(4), 2)
child = os.fork()
if not child:
    spread(done.append, range(4), 2)
    os._exit(0 if len(done) == 8 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0\n", done.stderr
