"""Is there one sound library for every set of sources, whatever happens to its cache? Facts about files and processes.

The sources are stand-ins: a C function for each of the interface, compiled in no time. The CUDA compiler is a script
that writes down what it was told.
"""

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from smelt_budget.model import experts_choice, experts_cuda, kernel_build, kernel_compiler, kernel_library
from smelt_budget.model.kernel_build import ARCHITECTURES, KernelBuildError, NoCompiler, build
from smelt_budget.model.kernel_library import ANSWERS, WORK, KernelError, LibraryError

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "kernels"
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def stand_in(folder, version=1):
    """Sources with every function of the interface, which work nowhere: code 7 means "no device"."""
    names = [name for name in ANSWERS if name not in ("abi_version", "message")]
    functions = [f"int smelt_abi_version() {{ return {version}; }}"]
    functions += ['const char* smelt_message(int) { return "no device"; }']
    functions += [f"int smelt_{name}() {{ return 0; }}" for name in names]
    functions += [f"int smelt_{name}() {{ return 7; }}" for name in (*WORK, "capability")]
    for place in ("include", "src", "emulator"):
        (folder / place).mkdir(parents=True)
    (folder / "include" / "abi.h").write_text("// the interface\n")
    (folder / "src" / "abi.cu").write_text('#include "abi.h"\nextern "C" {\n' + "\n".join(functions) + "\n}\n")
    return folder


@pytest.fixture
def sources(tmp_path):
    return stand_in(tmp_path / "kernels")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    kernel_library.of_cache.cache_clear()
    experts_choice.decided.cache_clear()
    yield tmp_path / "cache" / "smelt-budget" / "kernels"
    kernel_library.of_cache.cache_clear()
    experts_choice.decided.cache_clear()


def program(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def nvcc(folder, knows="sm_80 sm_90 sm_100", release="13.0"):
    """A compiler that writes its arguments where the result belongs."""
    return program(
        folder / "bin" / "nvcc",
        f"""case "$1" in
  --version) echo "release {release}";;
  --list-gpu-code) echo {knows};;
  *) told="$*"; while [ $# -gt 0 ]; do [ "$1" = -o ] && echo "$told" > "$2"; shift; done;;
esac""",
    ).parents[1]


@pytest.fixture
def no_nvcc(tmp_path, monkeypatch):
    """A machine without CUDA."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(kernel_compiler, "SYSTEM", tmp_path / "no-toolkit")
    monkeypatch.setattr(kernel_compiler, "nvidia_folders", list)


# The key


@needs_gxx
def test_the_cache_knows_sources_and_flags(sources, cache):
    """The same sources are compiled once; one letter in a header, or a flag, is another library beside the first."""
    first = build("emulated", sources=sources)
    made = first.stat().st_mtime_ns
    assert build("emulated", sources=sources) == first
    assert first.stat().st_mtime_ns == made
    (sources / "include" / "abi.h").write_text("// the interface!\n")
    changed = build("emulated", sources=sources)
    flags = build("emulated", sources=sources, sanitize="undefined")
    assert len({first.parent, changed.parent, flags.parent}) == 3
    assert first.parent.parent == cache
    (sources / "include" / "abi.h").write_text("// the interface\n")
    assert build("emulated", sources=sources) == first


def test_the_cache_knows_compiler_and_architectures(sources, tmp_path, monkeypatch):
    """Another release of nvcc, or another GPU, is another library."""
    made = set()
    for release in ("13.0", "13.5"):
        monkeypatch.setenv("CUDA_HOME", str(nvcc(tmp_path / release, release=release)))
        made |= {build("cuda", sources=sources, architectures=names).parent for names in (["sm_80"], ["sm_90a"])}
    assert len(made) == 4


def test_a_library_for_every_gpu_serves_for_one(sources, tmp_path, monkeypatch):
    """After `make kernels` the first use compiles nothing."""
    monkeypatch.setenv("CUDA_HOME", str(nvcc(tmp_path / "cuda")))
    assert build("cuda", sources=sources, architectures=["sm_90a"]) != build("cuda", sources=sources)
    assert build("cuda", sources=sources, architectures=["sm_80"]) == build("cuda", sources=sources)


def test_code_is_made_for_what_the_compiler_knows(sources, tmp_path, monkeypatch):
    """nvcc 12.4 knows no sm_100; a GPU that is newer than the compiler takes the PTX of compute_80."""
    monkeypatch.setenv("CUDA_HOME", str(nvcc(tmp_path / "old", knows="sm_80 sm_86 sm_90", release="12.4")))

    def codes(names):
        log = (build("cuda", sources=sources, architectures=names).parent / "build.log").read_text()
        return [name for name in (*ARCHITECTURES, "sm_86", "sm_150") if f"code={name} " in log]

    assert codes(["sm_86"]) == ["sm_86"]
    assert codes(["sm_150"]) == ["sm_80", "sm_90a", "compute_80"]
    assert codes(ARCHITECTURES) == ["sm_80", "sm_90a", "compute_80"]


# Compilers


def test_without_a_compiler_it_says_where_it_looked_and_what_helps(sources, no_nvcc, tmp_path, monkeypatch):
    """Every place, with what was wrong there."""
    monkeypatch.setenv("CUDA_HOME", str(nvcc(tmp_path / "older", release="11.8")))
    broken = program(tmp_path / "broken" / "bin" / "nvcc", "exit 1").parents[1]
    monkeypatch.setenv("CUDA_PATH", str(broken))
    with pytest.raises(NoCompiler) as caught:
        build("cuda", sources=sources)
    assert str(caught.value).splitlines() == [
        "no nvcc, which compiles the expert kernels",
        f"  looked for: {tmp_path}/older/bin/nvcc (CUDA_HOME): release 11, 12 is needed",
        f"  looked for: {tmp_path}/broken/bin/nvcc (CUDA_PATH): does not start",
        "  looked for: nvcc on PATH: not there",
        f"  looked for: {tmp_path}/no-toolkit/bin/nvcc: not there",
        "  looked for: NVIDIA's wheels (nvidia-cuda-nvcc): not there",
        "  fix: pip install 'smelt-budget[cuda]', or install the CUDA toolkit",
    ]
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NoCompiler, match="no-such-compiler does not start"):
        build("emulated", sources=sources)


def test_without_a_compiler_torch_computes_the_experts(no_nvcc, monkeypatch, caplog):
    """A GPU where all else fits: the choice is torch, with the reason; asked for by name it is an error."""
    import torch

    from smelt_budget.errors import BadInput

    monkeypatch.setattr(experts_choice, "of_device", lambda asked, device: ())
    at = experts_choice.Circumstances(torch.device("cuda"), torch.bfloat16, torch.float32, (8, 64, 32), False, False)
    choice = experts_choice.chosen("auto", at)
    assert choice.words == "torch (no nvcc, which compiles the expert kernels)"
    assert "the experts are computed by torch: no nvcc" in caplog.text
    with pytest.raises(BadInput, match="the cuda experts were asked for, but no nvcc"):
        experts_choice.chosen("cuda", at)


def test_the_wheels_of_nvidia_are_found_after_everything_else(sources, no_nvcc, tmp_path, monkeypatch):
    """nvidia/cu13/bin/nvcc, whose libraries are in lib, where it does not look itself."""
    wheels = tmp_path / "site-packages" / "nvidia"
    home = nvcc(wheels / "cu13")
    (home / "lib").mkdir()
    (home / "lib" / "libcudart_static.a").write_text("")
    monkeypatch.setattr(kernel_compiler, "nvidia_folders", lambda: [wheels])
    monkeypatch.setenv("PATH", f"{tmp_path / 'nowhere'}:/bin:/usr/bin")
    if shutil.which("nvcc"):
        pytest.skip("an nvcc is in /usr/bin")
    assert kernel_compiler.nvcc().program == str(home / "bin" / "nvcc")
    log = (build("cuda", sources=sources).parent / "build.log").read_text()
    assert f"-cudart=static -L{home / 'lib'} " in log
    monkeypatch.setenv("CUDA_HOME", str(nvcc(tmp_path / "system")))
    assert kernel_compiler.nvcc().program == f"{tmp_path}/system/bin/nvcc"


@needs_gxx
def test_an_error_carries_what_the_compiler_said_last(sources, cache):
    """The line at fault, and nothing is left in the cache but the lock."""
    with (sources / "src" / "abi.cu").open("a") as file:
        file.write("int broken = nonsense;\n")
    with pytest.raises(KernelBuildError, match=r"nonsense. was not declared"):
        build("emulated", sources=sources)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# The cache


def cut(library):
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


DAMAGE = {
    "cut off": cut,
    "empty": lambda library: library.write_bytes(b""),
    "gone": Path.unlink,
    "no stamp": lambda library: (library.parent / "stamp.json").unlink(),
    "a broken stamp": lambda library: (library.parent / "stamp.json").write_text('{"library": 3}'),
    "a folder without anything": lambda library: shutil.rmtree(library.parent) or library.parent.mkdir(),
    "a file for a folder": lambda library: shutil.rmtree(library.parent) or library.parent.write_text(""),
}


@needs_gxx
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_cache_heals(damage, sources, caplog):
    """A library that was cut off would end the process on loading it."""
    caplog.set_level("INFO")
    library = build("emulated", sources=sources)
    before = library.read_bytes()
    DAMAGE[damage](library)
    healed = build("emulated", sources=sources)
    assert healed.read_bytes() == before
    assert ctypes.CDLL(str(healed)).smelt_abi_version() == 1
    assert caplog.text.count("damaged") == 1
    assert [path.name for path in healed.parent.parent.iterdir() if path.suffix != ".lock"] == [healed.parent.name]


@needs_gxx
@pytest.mark.parametrize("what", ["another version", "a function missing", "no library"])
def test_a_library_that_does_not_load_is_compiled_again(what, sources, tmp_path, monkeypatch, caplog):
    """The stamp says it is what was compiled, and yet: the process that has loaded the bad one gets the good one."""
    caplog.set_level("INFO")
    monkeypatch.setattr(kernel_build, "kernels_folder", lambda: sources)
    library = build("emulated")
    if what == "no library":
        bad = b"text"
    else:
        other = stand_in(tmp_path / "other", version=2 if what == "another version" else 1)
        if what == "a function missing":
            text = (other / "src" / "abi.cu").read_text()
            (other / "src" / "abi.cu").write_text(text.replace("smelt_combine", "combine"))
        bad = build("emulated", sources=other).read_bytes()
    library = library.rename(library.with_stem("forged"))
    library.write_bytes(bad)
    stamp = {"library": library.name, "sha256": hashlib.sha256(bad).hexdigest()}
    (library.parent / "stamp.json").write_text(json.dumps(stamp))
    loaded = kernel_library.load("emulated")
    assert loaded.abi_version() == 1
    assert loaded.path.parent == library.parent
    assert "compiled again" in caplog.text


@needs_gxx
def test_sources_of_another_version_are_refused(sources, tmp_path, monkeypatch):
    """Compiling them again does not help, and is tried once."""
    other = stand_in(tmp_path / "other", version=2)
    monkeypatch.setattr(kernel_build, "kernels_folder", lambda: other)
    with pytest.raises(LibraryError, match="version 2 of the interface, not 1"):
        kernel_library.load("emulated")


@needs_gxx
def test_a_cache_that_cannot_be_written_is_replaced_for_the_process(sources, tmp_path, monkeypatch, caplog):
    """A file stands in its way (root may write anywhere); the temporary folder is said, and goes with the process."""
    caplog.set_level("INFO")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    library = build("emulated", sources=sources)
    assert library == build("emulated", sources=sources)
    assert f"{tmp_path}/file/smelt-budget/kernels cannot be written" in caplog.text
    assert str(library.parents[1]) in caplog.text
    said = started(sources).communicate(timeout=60)[0]
    assert not Path(said.splitlines()[-1].removeprefix("PATH ")).exists()


BUILD = """
import logging, sys, types
from pathlib import Path
model = sys.modules["smelt_budget.model"] = types.ModuleType("smelt_budget.model")
model.__path__ = ["smelt_budget/model"]  # the package itself takes seconds: torch
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
from smelt_budget.model.kernel_build import build
print("PATH", build("emulated", sources=Path(sys.argv[1])), flush=True)
"""


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A compiler that waits until a file is there, and counts its starts."""
    script = f"""case "$1" in --version) exec g++ --version;; esac
echo started >> {tmp_path}/started
while [ ! -e {tmp_path}/go ]; do sleep 0.02; done
exec g++ "$@" """
    monkeypatch.setenv("CXX", str(program(tmp_path / "slow-g++", script)))
    return tmp_path


def started(sources):
    command = [sys.executable, "-u", "-c", BUILD, str(sources)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def until(true):
    """Within a minute."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_gxx
def test_two_processes_compile_once(sources, slow):
    """The second waits and says so; the compiler was started twice in all, for the one file and to link."""
    first = started(sources)
    until((slow / "started").exists)
    second = started(sources)
    line = second.stdout.readline()
    assert line.startswith("waiting for another process that compiles the same kernels")
    (slow / "go").touch()
    said = [process.communicate(timeout=60)[0] for process in (first, second)]
    paths = {line for text in said for line in text.splitlines() if line.startswith("PATH")}
    assert len(paths) == 1
    assert len((slow / "started").read_text().split()) == 2


@needs_gxx
def test_a_process_that_dies_leaves_no_lock(sources, slow):
    """Killed while it compiles, with its compiler: the one that waited compiles, and the next is served at once."""
    first = started(sources)
    until((slow / "started").exists)
    second = started(sources)
    assert second.stdout.readline().startswith("waiting")
    os.killpg(first.pid, 9)
    first.communicate()
    (slow / "go").touch()
    path = second.communicate(timeout=60)[0].splitlines()[-1].removeprefix("PATH ")
    assert str(build("emulated", sources=sources)) == path
    assert ctypes.CDLL(path).smelt_abi_version() == 1


# The library


@needs_gxx
def test_a_code_becomes_an_error_with_its_message(sources):
    """Also that of the capability, on a machine without a device."""
    library = kernel_library.load("emulated", build("emulated", sources=sources))
    with pytest.raises(KernelError, match="smelt_capability: no device"):
        library.capability()
    with pytest.raises(KernelError, match="smelt_combine: no device"):
        library.combine(None, None, None, None, 0, 0, 0, None)
    with pytest.raises(ctypes.ArgumentError):
        library.combine(None, None, None, None, 0.5, 0, 0, None)


def test_the_table_has_the_functions_of_the_header():
    """Names and numbers of arguments in kernels/include/abi.h, read as text."""
    import re

    text = (SOURCES / "include" / "abi.h").read_text()
    text = re.sub(r"//[^\n]*", "", text)
    declared = {
        name: 0 if arguments.strip() in ("void", "") else arguments.count(",") + 1
        for name, arguments in re.findall(r"\bsmelt_(\w+)\(([^)]*)\)", text)
    }
    answers = {name: len(types) for name, (_, types) in {**ANSWERS, **kernel_library.EMULATOR}.items()}
    assert declared == answers | {name: len(types) for name, types in WORK.items()} | {"capability": 1}
    assert int(re.search(r"SMELT_ABI_VERSION = (\d+)", text)[1]) == kernel_library.ABI_VERSION
    stages = dict(re.findall(r"SMELT_(UP|WGRAD_UP|WGRAD_DOWN|BF16|FP32|FP32_ADD) = (\d)", text))
    ours = (experts_cuda.UP, experts_cuda.WGRAD_UP, experts_cuda.WGRAD_DOWN)
    ours += (experts_cuda.BF16, experts_cuda.FLOAT32, experts_cuda.FLOAT32_ADD)
    assert [int(stages[n]) for n in ("UP", "WGRAD_UP", "WGRAD_DOWN", "BF16", "FP32", "FP32_ADD")] == list(ours)


# What is handed out


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Wheel and source archive, made by the project's own back end."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("archives")
    for kind in ("wheel", "sdist"):
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_wheel_and_source_archive_carry_the_sources(archives):
    """Every header and every source, byte for byte."""
    wanted = kernel_build.contents("cuda", SOURCES) | kernel_build.contents("native", SOURCES)
    wanted = {name: text for name, text in wanted.items() if name.startswith(("include", "src", "emulator", "cpu"))}
    assert {"include/abi.h", "src/abi.cu", "cpu/experts.cpp", "cpu/vector.h"} < set(wanted)
    with zipfile.ZipFile(archives[0]) as wheel:
        held = {name: wheel.read(f"smelt_budget/kernels/{name}") for name in wanted}
        assert not [name for name in wheel.namelist() if name.startswith("kernels/")]
    assert held == wanted
    with tarfile.open(archives[1]) as sdist:
        top = sdist.getnames()[0].split("/")[0]
        held = {name: sdist.extractfile(f"{top}/kernels/{name}").read() for name in wanted}
    assert held == wanted


def test_an_installed_package_finds_its_own_sources(archives, tmp_path):
    """Not a package named kernels that is installed beside it, as Hugging Face's is."""
    with zipfile.ZipFile(archives[0]) as wheel:
        wheel.extractall(tmp_path)
    (tmp_path / "kernels" / "include").mkdir(parents=True)
    (tmp_path / "kernels" / "include" / "abi.h").write_text("")
    code = "from smelt_budget.model.kernel_build import kernels_folder; print(kernels_folder())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(tmp_path / "smelt_budget" / "kernels")
