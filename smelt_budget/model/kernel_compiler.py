"""Who compiles the expert kernels, and what is it told? g++ for a CPU and for the emulator, nvcc for CUDA.

nvcc is looked for where CUDA_HOME and CUDA_PATH say, on PATH, in /usr/local/cuda and in NVIDIA's wheels from PyPI, in
this order; the first that starts and is new enough is taken.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smelt_budget.errors import SmeltError

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "compute_80")
"""Of a library for every machine: three generations, and PTX for what comes between and after."""
SYSTEM = Path("/usr/local/cuda")
"""Where NVIDIA's installers put a toolkit."""
OLDEST = 12
"""The first nvcc that knows wgmma."""


class KernelBuildError(SmeltError):
    """The kernels were not compiled; the last lines of the compiler are the details."""


class NoCompiler(KernelBuildError):
    """Nothing here compiles the kernels; the details say where it was looked for and how to get it."""


@dataclass(frozen=True)
class Compiler:
    """A program that was started once and answered."""

    program: str
    version: str
    """All it says of itself, and the host compiler behind it."""
    link: tuple[str, ...] = ()
    """Where its libraries are, if it does not know."""
    knows: tuple[str, ...] = ()
    """The GPUs that nvcc can compile for."""


def gxx() -> Compiler:
    """The C++ compiler of `CXX`, or g++.

    Raises:
        NoCompiler: it does not start.
    """
    program = os.environ.get("CXX") or "g++"
    version = answer([program, "--version"])
    if version is None:
        raise NoCompiler(f"no C++ compiler: {program} does not start", "fix: install g++")
    return Compiler(program, version)


def nvcc() -> Compiler:
    """The system's nvcc, or that of NVIDIA's wheels.

    Raises:
        NoCompiler: neither is there, or neither starts.
    """
    looked = []
    for where, program in nvcc_candidates():
        version = None if program is None else answer([program, "--version"])
        release = None if version is None else re.search(r"release (\d+)", version)
        if program is None or version is None or release is None or int(release[1]) < OLDEST:
            too_old = f"release {release[1]}, {OLDEST} is needed" if release else "does not start"
            looked.append(f"looked for: {where}: {'not there' if program is None else too_old}")
            continue
        host = answer(["g++", "--version"]) or ""
        knows = tuple((answer([program, "--list-gpu-code"]) or "").split())
        root = Path(program).parents[1]
        # the wheels have lib where a toolkit has lib64, and nvcc looks only there
        link = (f"-L{root / 'lib'}",) if (root / "lib" / "libcudart_static.a").is_file() else ()
        return Compiler(program, version + host, link, knows)
    raise NoCompiler(
        "no nvcc, which compiles the expert kernels",
        *looked,
        "fix: pip install 'smelt-budget[cuda]', or install the CUDA toolkit",
    )


def nvcc_candidates() -> Iterator[tuple[str, str | None]]:
    """Where an nvcc may be, in words, and its path if there is a file."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            path = Path(value, "bin", "nvcc")
            yield f"{path} ({variable})", str(path) if path.is_file() else None
    yield "nvcc on PATH", shutil.which("nvcc")
    yield f"{SYSTEM}/bin/nvcc", str(SYSTEM / "bin" / "nvcc") if (SYSTEM / "bin" / "nvcc").is_file() else None
    wheels = [path for folder in nvidia_folders() for path in sorted(folder.glob("cu*/bin/nvcc"), reverse=True)]
    yield "NVIDIA's wheels (nvidia-cuda-nvcc)", str(wheels[0]) if wheels else None


def nvidia_folders() -> list[Path]:
    """Where NVIDIA's wheels are installed."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def answer(command: list[str]) -> str | None:
    """What a program says of itself; None if it does not start."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def emulated_flags(sanitize: str | None) -> list[str]:
    """What g++ is told; checked code is not optimised: 72 s of compiling, and at -O2 more than ten minutes."""
    checked = ["-O0", "-g1", f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else ["-O2"]
    # lines are those of kernels/, not of the copy that is compiled and gone
    lines = ["-ffile-prefix-map=src=kernels/src", "-ffile-prefix-map=include=kernels/include"]
    return ["-std=c++17", "-DSMELT_EMULATED", "-fPIC", "-pthread", *lines, *checked]


def native_flags(compiler: Compiler, sanitize: str | None) -> list[str]:
    """What g++ is told for this very CPU; what that means is among the flags, so that no other CPU takes the library.

    Raises:
        KernelBuildError: it does not know the CPU it runs on.
    """
    here = answer([compiler.program, "-march=native", "-dM", "-E", "-xc++", os.devnull])
    if here is None:
        raise KernelBuildError(f"{compiler.program} does not know -march=native", "fix: CXX=g++, or a newer one")
    checked = ["-O1", "-g1", f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else ["-O3"]
    means = hashlib.sha256(here.encode()).hexdigest()[:12]
    return [
        "-std=c++17",
        "-march=native",
        "-ffp-contract=fast",
        "-fopenmp",
        "-fPIC",
        f"-DSMELT_MADE_FOR=0x{means}",
        *checked,
    ]


def cuda_flags(compiler: Compiler, architectures: Sequence[str]) -> list[str]:
    """What nvcc is told; for a GPU it does not know, all it does know, among them PTX for the driver to translate.

    Raises:
        KernelBuildError: it knows nothing that our kernels run on.
    """
    known = {gpu.split("_")[1] for gpu in compiler.knows}
    for asked in (architectures, ARCHITECTURES):
        numbers = {name: name.split("_")[1] for name in asked if name.split("_")[1].rstrip("af") in known}
        if numbers:
            code = [f"-gencode=arch=compute_{number},code={name}" for name, number in numbers.items()]
            return ["-std=c++17", "-O3", "-Xcompiler=-fPIC", "-Xptxas=-v", *code]
    raise KernelBuildError(f"{compiler.program} knows none of {', '.join(ARCHITECTURES)}", "fix: a newer nvcc")
