"""Which text is on this machine already? Python's own sources, and the prose that came with the installed packages.

code    `.py` of the standard library, tests included (28 MB of CPython 3.11); of installed packages where that is
        under 5 MB, as in zipped and some distributions' Pythons
docs    pydoc's topics, one document each; long descriptions of installed distributions; `.md`, `.rst`, `.txt`

Nothing is downloaded. The code is the same wherever the Python version is; the prose depends on what is installed,
so results are comparable only between equal fingerprints.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SMALLEST, LARGEST = 200, 200_000
"""Bytes: below is `__init__.py`, above are tables (28.4 of 31.5 MB of CPython 3.11.7's `.py` remain)."""
ENOUGH_CODE = 5_000_000  # bytes; a 300-step run reads 0.6 MB
MOST_CODE = 30_000_000  # bytes taken from packages: as much as a whole standard library
PROSE = (".md", ".rst", ".txt")
NO_PROSE = {"test", "tests", "licenses", "license", "idle_test", "data"}
"""Folders whose text files are tables and licences."""
NO_PROSE_FILES = ("license", "copying", "notice", "requirements", "grammar", "cmakelists", "top_level", "authors")
MACHINE_OWN = ("config-", "_sysconfigdata")
"""The standard library's files that hold this machine's paths."""


@dataclass(frozen=True)
class Text:
    """One document: UTF-8, with the name that decides on which side of the split it falls."""

    name: str
    content: bytes


def documents() -> dict[str, tuple[Text, ...]]:
    """Domain to its documents, sorted by name; no content twice."""
    seen: set[bytes] = set()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    packages = Path(sysconfig.get_paths()["purelib"])
    code = kept(files(stdlib, "stdlib", (".py",)), seen)
    if sum(len(text.content) for text in code) < ENOUGH_CODE:
        code += kept(capped(files(packages, "packages", (".py",)), MOST_CODE), seen)
    prose = [*topics(), *descriptions(), *files(stdlib, "stdlib", PROSE), *files(packages, "packages", PROSE)]
    return {"code": code, "docs": kept(prose, seen)}


def fingerprint(texts: Iterable[Text]) -> str:
    """sha256 over the sorted (name, sha256 of content); independent of the order given."""
    whole = hashlib.sha256()
    for name, digest in sorted((text.name, hashlib.sha256(text.content).hexdigest()) for text in texts):
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()


def origin() -> str:
    """The Python whose sources these are."""
    return f"{platform.python_implementation()} {platform.python_version()}"


def kept(texts: Iterable[Text], seen: set[bytes]) -> tuple[Text, ...]:
    """Those of fitting size and valid UTF-8 that were not `seen`, by name."""
    chosen = []
    for text in sorted(texts, key=lambda text: text.name):
        digest = hashlib.sha256(text.content).digest()
        if SMALLEST <= len(text.content) <= LARGEST and digest not in seen and is_utf8(text.content):
            seen.add(digest)
            chosen.append(text)
    return tuple(chosen)


def is_utf8(content: bytes) -> bool:
    """Whether it decodes; tests of encodings do not."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def files(root: Path, label: str, suffixes: tuple[str, ...]) -> Iterator[Text]:
    """Files under `root`, other packages' folders and machine-specific files left out; unreadable ones too."""
    prose = suffixes == PROSE
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if enters(name, prose))
        for name in sorted(names):
            if not name.lower().endswith(suffixes) or name.startswith(MACHINE_OWN):
                continue
            if prose and name.lower().startswith(NO_PROSE_FILES):
                continue
            path = Path(folder, name)
            try:
                if SMALLEST <= path.stat().st_size <= LARGEST:
                    yield Text(f"{label}/{path.relative_to(root).as_posix()}", path.read_bytes())
            except OSError:
                continue


def enters(folder: str, prose: bool) -> bool:
    """Whether a folder of this name is walked."""
    if folder in {"site-packages", "dist-packages", "__pycache__"} or folder.startswith(MACHINE_OWN):
        return False
    return not (prose and (folder.lower() in NO_PROSE or folder.endswith((".dist-info", ".egg-info"))))


def capped(texts: Iterable[Text], most: int) -> Iterator[Text]:
    """The first of `texts` up to `most` bytes."""
    for text in texts:
        most -= len(text.content)
        if most < 0:
            return
        yield text


def topics() -> Iterator[Text]:
    """What `help()` prints about the language: the only prose in the standard library."""
    try:
        from pydoc_data.topics import topics as pages
    except ImportError:
        return
    for name, page in pages.items():
        yield Text(f"topics/{name}", page.encode())


def descriptions() -> Iterator[Text]:
    """Long descriptions of installed distributions, usually their READMEs; not ours, which changes as we write it."""
    for distribution in importlib.metadata.distributions():
        try:
            head, _, body = (distribution.read_text("METADATA") or "").partition("\n\n")
            name = distribution.metadata["Name"] if head else None
        except (OSError, UnicodeDecodeError):
            continue
        if name and name.lower().replace("_", "-") != "smelt-budget":
            yield Text(f"descriptions/{name}", body.encode(errors="replace"))
