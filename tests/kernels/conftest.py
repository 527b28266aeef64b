"""The kernels on the CPU: the library that g++ makes of them and the emulator, loaded once a process."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from smelt_budget.model import kernel_library

sys.path.insert(0, str(Path(__file__).parent))  # oracle, cases, mutants: the GPU's script imports them from here too
torch.set_num_threads(1)  # the emulator has threads of its own
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: minutes on a small machine; -m 'not slow' leaves it out")


@pytest.fixture(scope="session")
def emulated():
    """The library; what a test changes of it is the seed."""
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        pytest.skip("g++ is not installed")
    library = kernel_library.load("emulated")
    library.emulator_threads(THREADS)
    return library


@pytest.fixture
def library(emulated):
    """The same, under the first schedule."""
    emulated.emulator_seed(1)
    return emulated
