"""Do the fragments, tiles and descriptors mean what NVIDIA's CuTe means by them?

`oracles/cute_layouts.cpp` asks CuTe (PyPI: nvidia-cutlass), compiled for the host. Its answers are compared with the
maps of `conformance.py`, by which test_emulator.py tests every product, with the descriptors that hopper.h makes, and
with the places where the emulator reads an operand. All are exact.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smelt_budget.model import kernel_build

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "kernels" / "conformance"))
import conformance  # noqa: E402

pytestmark = pytest.mark.slow  # CuTe takes a quarter of a minute to compile
WHERE_SHARED_BEGINS = 1024
"""As the emulator's wgmma sees it."""


@pytest.fixture(scope="module")
def cute(tmp_path_factory):
    """CuTe's integers by the words before them."""
    found = importlib.util.find_spec("cutlass_library")
    if found is None:
        pytest.skip("nvidia-cutlass is not installed")
    try:
        nvcc = kernel_build.nvcc().program  # knows where CUDA's headers are
    except kernel_build.NoCompiler:
        pytest.skip("nvcc is not installed: CuTe needs CUDA's headers")
    headers = Path(found.origin).parent / "source" / "include"
    program = tmp_path_factory.mktemp("cute") / "cute_layouts"
    flags = ["-x", "c++", "-std=c++17", "-O0", "-w", "-cudart", "none", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"]
    source = HERE / "oracles" / "cute_layouts.cpp"
    subprocess.run([nvcc, *flags, f"-I{headers}", str(source), "-o", str(program)], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    answers = {}
    for line in said.splitlines():
        words = line.split()
        if words[0] == "ERROR:":  # of the address that a host pointer has not
            continue
        named = {"mma": 2, "wgmma": 2, "tile": 4, "descriptor": 5}[words[0]]
        answers[" ".join(words[:named])] = torch.tensor([int(word) for word in words[named:]])
    return answers


@pytest.fixture(scope="module")
def probes():
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    library = ctypes.CDLL(str(conformance.compiled("emulated", sorted((HERE / "probes").glob("*.cu")))))
    library.probe_descriptor.restype = ctypes.c_uint64
    library.probe_chunks.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return library


@pytest.mark.parametrize(("operand", "number"), [("a", 0), ("b", 1), ("c", 2)])
def test_fragments_of_mma(cute, operand, number):
    ours = conformance.mma_places()[number]
    assert torch.equal(cute[f"mma {operand}"].view(ours.shape), ours)


@pytest.mark.parametrize("columns", conformance.COLUMNS)
def test_accumulators_of_wgmma(cute, columns):
    ours = conformance.wgmma_places(columns)
    assert torch.equal(cute[f"wgmma {columns}"].view(ours.shape), ours)


@pytest.mark.parametrize("columns", conformance.COLUMNS)
@pytest.mark.parametrize(("major", "first"), [("K", "mn"), ("MN", "mn"), ("MN", "k")])
def test_descriptors_and_what_is_read_through_them(cute, probes, major, first, columns):
    """Fields equal, but for LBO where there is one group of 64; every chunk where CuTe has its 8 elements.

    CuTe makes MN-major tiles of whole groups of 64; 96 and 176 read a part of the last one.
    """
    mn_major = major == "MN"
    rows = -(-columns // 64) * 64 if mn_major else columns
    name = f"{major} {rows} {first}"
    tile = cute[f"tile {name}"].view(rows, 64)[:columns]
    for step in range(4):
        start, leading, stride, swizzle = cute[f"descriptor {name} {step}"].tolist()
        ours = probes.probe_descriptor(4096 + start, mn_major, leading * 16, stride * 16)
        assert ours & 0x3FFF == (WHERE_SHARED_BEGINS + 4096 + start) >> 4
        assert ours >> 16 & 0x3FFF == leading
        assert ours >> 32 & 0x3FFF == stride
        assert ours >> 49 & 7 == 0
        assert ours >> 62 == swizzle

        chunks = torch.zeros(columns * 2, dtype=torch.int32)
        probes.probe_chunks(ours, columns, mn_major, chunks.data_ptr())
        part = tile[:, step * 16 : step * 16 + 16]
        firsts = part[::8].T if mn_major else part[:, ::8]  # of the chunks, in the emulator's order
        within = part.view(-1, 8, 16).transpose(1, 2) if mn_major else part.view(columns, 2, 8)
        assert torch.equal(within, within[..., :1] + 2 * torch.arange(8))
        assert torch.equal(chunks.long(), 4096 + firsts.flatten())


@pytest.mark.parametrize(("major", "first"), [("K", "mn"), ("MN", "k")])
def test_the_defaults_of_descriptor_are_tiles_one_block_after_the_other(cute, probes, major, first):
    """Rows of 128 bytes on end; MN-major: 64 k of 64 columns, then the next 64 columns, 8192 bytes on."""
    assert cute[f"descriptor {major} 256 {first} 1"].tolist()[1:] == [512 if major == "MN" else 1, 64, 1]
    ours = probes.probe_descriptor(0, major == "MN", 8192, 1024)
    assert (ours >> 16 & 0x3FFF, ours >> 32 & 0x3FFF, ours >> 62) == (512 if major == "MN" else 1, 64, 1)
