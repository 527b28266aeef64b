"""Where does the library of the expert kernels come from? Compiled once, then from a cache; a broken one is replaced.

    cuda       nvcc, for every architecture of ARCHITECTURES or for those asked; cudart is linked in
    native     g++ or $CXX on `kernels/cpu`, for the CPU it runs on
    emulated   g++ on the sources for CUDA, with the emulator of `kernels/emulator` in place of CUDA: a test back end

A library's folder in the cache is named after what it was made from: sources, flags, compiler and architectures. It is
built beside its place and renamed into it, under a lock; its stamp knows what is in it, so that a file that was cut off
or replaced is noticed before it is loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from smelt_budget.model.kernel_compiler import (
    ARCHITECTURES,
    Compiler,
    KernelBuildError,
    NoCompiler,
    cuda_flags,
    emulated_flags,
    gxx,
    native_flags,
    nvcc,
)

__all__ = ["ARCHITECTURES", "KernelBuildError", "NoCompiler", "Target", "build", "gxx", "kernels_folder", "nvcc"]

Target = Literal["cuda", "native", "emulated"]
LAST_LINES = 12
"""Of what a compiler said; the whole is in the log."""
MOST_AT_ONCE = 8  # a translation unit takes up to a gigabyte in ptxas
STAMP, LOG = "stamp.json", "build.log"

log = logging.getLogger("smelt_budget.kernels")


def build(
    target: Target,
    *,
    sources: Path | None = None,
    sanitize: str | None = None,
    architectures: Sequence[str] = ARCHITECTURES,
    anew: bool = False,
) -> Path:
    """The path of the shared library, compiled if it is not in the cache.

    `sources` is a folder like `kernels`; `sanitize` is what g++ calls so (not for cuda). A library for all
    `architectures` serves for fewer. `anew` compiles even if a sound library is there.

    Raises:
        NoCompiler: none was found.
        KernelBuildError: it found errors in the sources.
    """
    texts = contents(target, kernels_folder() if sources is None else Path(sources))
    compiler = nvcc() if target == "cuda" else gxx()

    def recipe(names: Sequence[str]) -> tuple[list[str], str]:
        if target == "cuda":
            flags = cuda_flags(compiler, names)
        else:
            flags = native_flags(compiler, sanitize) if target == "native" else emulated_flags(sanitize)
        return flags, f"{target}-{fingerprint(texts, [target, compiler.version, *flags, *compiler.link])}"

    flags, name = recipe(architectures)
    for found in (recipe(ARCHITECTURES)[1], name):
        if not anew and (library := sound(cache_folder() / found)):
            return library
    root = writable(cache_folder())
    with locked(root / f"{name}.lock"):
        if not anew and (library := sound(root / name)):
            return library
        if (root / name).exists():
            log.info("the kernels in %s are damaged or do not load; they are compiled again", root / name)
        log.info("compiling the expert kernels (%s) into %s", target, root / name)
        return compiled(target, compiler, flags, texts, root / name)


def kernels_folder() -> Path:
    """Where the sources are: in the installed package, or beside it in a checkout.

    Raises:
        KernelBuildError: in neither.
    """
    package = Path(__file__).parents[1]
    # inside first: `kernels` beside an installed package is somebody else's package of that name
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "include" / "abi.h").is_file():
            return folder
    raise KernelBuildError(
        f"the sources of the kernels are missing: neither {package / 'kernels'} nor {package.parent / 'kernels'}",
        "fix: install smelt-budget again",
    )


def cache_folder() -> Path:
    """The user's cache for compiled kernels; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "smelt-budget" / "kernels"


def contents(target: Target, sources: Path) -> dict[str, bytes]:
    """Every source, read once: one that is edited while it is compiled would be kept under the wrong name."""
    found = sorted(path for path in sources.rglob("*") if path.suffix in (".cu", ".cpp", ".h"))
    names = {path.relative_to(sources).as_posix(): path for path in found}
    return {name: path.read_bytes() for name, path in names.items() if name.startswith("cpu/") == (target == "native")}


def fingerprint(texts: dict[str, bytes], recipe: Sequence[str]) -> str:
    """Of everything a library is made from."""
    digest = hashlib.sha256(json.dumps(list(recipe)).encode())
    for name, text in texts.items():
        digest.update(f"\0{name}\0".encode() + text)
    return digest.hexdigest()[:20]


def sound(folder: Path) -> Path | None:
    """The library in a folder of the cache, if it is what the stamp says it is."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        library = folder / stamp["library"]
        return library if hashlib.sha256(library.read_bytes()).hexdigest() == stamp["sha256"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def compiled(target: Target, compiler: Compiler, flags: list[str], texts: dict[str, bytes], place: Path) -> Path:
    """The library and its stamp, made beside their place and renamed into it at once."""
    work = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
    try:
        for name, text in texts.items():
            (work / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
            (work / "sources" / name).write_bytes(text)
        library = work / f"libsmelt_{target}.so"
        (work / LOG).write_text(linked(target, compiler, flags, work / "sources", library), encoding="utf-8")
        shutil.rmtree(work / "sources")
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        # named after its content: a process that holds a bad one would be given that again for the same name
        library = library.rename(library.with_stem(f"{library.stem}-{digest[:12]}"))
        (work / STAMP).write_text(json.dumps({"library": library.name, "sha256": digest}), encoding="utf-8")
        work.chmod(0o755)
        if place.exists():
            place.rename(work / "before")
        work.rename(place)
        shutil.rmtree(place / "before", ignore_errors=True)
        return place / library.name
    finally:
        shutil.rmtree(work, ignore_errors=True)


def linked(target: Target, compiler: Compiler, flags: list[str], sources: Path, library: Path) -> str:
    """Every source a translation unit of its own, and all of them one library; returns what the compiler said."""
    where = ["-Iinclude", *(["-Iemulator", "-xc++"] if target == "emulated" else [])]
    units = sorted((sources / "cpu").glob("*.cpp") if target == "native" else (sources / "src").glob("*.cu"))
    objects = [str(library.with_name(f"{unit.stem}.o")) for unit in units]
    commands = [
        [compiler.program, *flags, *where, "-c", str(unit.relative_to(sources)), "-o", made]
        for unit, made in zip(units, objects, strict=True)
    ]
    with ThreadPoolExecutor(min(MOST_AT_ONCE, max(2, (os.cpu_count() or 1) // 2))) as pool:
        said = list(pool.map(functools.partial(ran, sources), commands))
    link = [flag for flag in flags if flag.startswith(("-fsanitize", "-pthread", "-fopenmp", "-gencode"))]
    link += [*(["-cudart=static"] if target == "cuda" else []), *compiler.link]
    said.append(ran(sources, [compiler.program, "-shared", *link, *objects, "-o", str(library)]))
    for made in objects:
        Path(made).unlink()
    return "".join(said)


def ran(folder: Path, command: list[str]) -> str:
    """What a compiler said that was called in a folder.

    Raises:
        KernelBuildError: it failed.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    said = f"$ {' '.join(command)}\n{done.stdout}{done.stderr}"
    if done.returncode:
        lines = [line for line in said.splitlines()[1:] if not line.startswith("ptxas info")]
        raise KernelBuildError(
            f"{Path(command[0]).name} does not compile the expert kernels (exit code {done.returncode})",
            *lines[-LAST_LINES:],
        )
    return said


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock of a process that died is free."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that compiles the same kernels (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems; then two may compile, and the last one's stays
            log.info("%s cannot be locked: %s", path, error.strerror)
        yield


def writable(folder: Path) -> Path:
    """The folder, or a temporary one for this process where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        instead = temporary()
        log.info("%s cannot be written (%s); kernels are kept in %s for this process", folder, error.strerror, instead)
        return instead


@functools.cache
def temporary() -> Path:
    """A folder that goes with the process."""
    folder = tempfile.mkdtemp(prefix="smelt-budget-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
