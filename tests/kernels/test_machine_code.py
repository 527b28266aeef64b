"""Does nvcc make of the sources what was meant? Compiled for every architecture; read from its log and disassembled.

No GPU is needed, and the library loads without one. A minute or two of compiling, once for each version of the sources.
"""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from smelt_budget.model import kernel_build, kernel_compiler, kernel_library
from smelt_budget.model.kernel_library import KernelError

pytestmark = pytest.mark.slow
REGISTERS = 248
"""Of a thread. 255 is all there is: a kernel that comes so near begins to spill with the next release of ptxas."""
INSTRUCTIONS = {
    "sm_80": ("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4", "LDSM.16.MT88.4"),
    "sm_90a": ("HGMMA.64x", "HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128"),
    "sm_100": ("HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4"),
}
"""What the products and copies of each must be made of, by the names of the disassembler."""


@pytest.fixture(scope="module")
def library():
    """Compiled for all architectures."""
    try:
        return kernel_build.build("cuda")
    except kernel_build.NoCompiler as error:
        pytest.skip(str(error).splitlines()[0])


def disassembler():
    """cuobjdump, which looks for nvdisasm beside itself."""
    folders = [folder for root in kernel_compiler.nvidia_folders() for folder in root.glob("cu*/bin")]
    for folder in [*map(str, folders), None]:
        if (found := shutil.which("cuobjdump", path=folder)) and shutil.which("nvdisasm", path=str(Path(found).parent)):
            return found
    return pytest.skip("cuobjdump and nvdisasm are not installed (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")


def test_nothing_spills_and_registers_are_to_spare(library):
    """Every kernel for every architecture, as ptxas reports it: exact."""
    log = (library.parent / kernel_build.LOG).read_text()
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert len(spills) == len(registers) > 30
    assert set(spills) == {("0", "0", "0")}
    assert max(registers) <= REGISTERS


def test_products_and_copies_are_the_instructions_that_were_meant(library):
    """Tensor cores, asynchronous copies of 16 bytes, ldmatrix; and wgmma in the code for sm_90a alone."""
    said = subprocess.run([disassembler(), "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    found = {name: Counter() for name in INSTRUCTIONS}
    for part in said.split("Fatbin elf code:")[1:]:
        name = re.search(r"arch = (sm_\w+)", part)[1]
        if name in found:
            found[name].update(re.findall(r"\b(?:HGMMA|HMMA|LDGSTS|LDSM)[\w.]*", part))
    for name, wanted in INSTRUCTIONS.items():
        for instruction in wanted:
            assert any(one.startswith(instruction) for one in found[name]), (name, instruction)
    assert not [one for name in ("sm_80", "sm_100") for one in found[name] if one.startswith("HGMMA")]


def test_the_library_loads_without_a_gpu_and_says_so(library):
    """It needs nothing but the C and C++ libraries; the first question to the device is answered in words."""
    import torch

    loaded = kernel_library.load("cuda", library)
    assert loaded.abi_version() == kernel_library.ABI_VERSION
    assert not loaded.emulated
    if shutil.which("ldd"):
        needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
        assert not re.search("torch|cudart|libcuda", needed)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(KernelError, match=r"smelt_capability: .*(driver|device)"):
        loaded.capability()
