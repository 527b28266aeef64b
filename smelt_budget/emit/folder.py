"""How does an emission reach the disk? All files or none, nothing outside the folder, nobody's work replaced.

Everything is written into a folder beside the place and renamed into it. With `force` a folder is replaced only if it
holds nothing but what an earlier emission listed in its `emitted.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from smelt_budget.emit.target import Content
from smelt_budget.errors import BadInput

MANIFEST = "emitted.json"


def check_place(folder: Path, force: bool) -> None:
    """Fail before the work: the place is taken, or cannot be written.

    Raises:
        BadInput: with what stands there.
    """
    restore(folder)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BadInput(f"{folder} is not a directory", "fix: another --out")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise BadInput(f"cannot write {folder}: no such directory {parent}", "fix: another --out, or make it")
    if not os.access(parent, os.W_OK):
        raise BadInput(f"cannot write {folder}: {parent} is not writable", "fix: another --out")
    if not folder.exists() or not any(folder.iterdir()):
        return
    foreign = sorted(set(held(folder)) - set(ours(folder)))
    if foreign:
        shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise BadInput(f"{folder} holds what emit did not write, and is left alone: {shown}", "fix: another --out")
    if not force:
        raise BadInput(f"{folder} exists and is not overwritten", "fix: --force, or another --out")


def held(folder: Path) -> list[str]:
    """Every file below, relative; what Python and shells leave behind is not anybody's work."""
    files = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    return [path.relative_to(folder).as_posix() for path in files if "__pycache__" not in path.parts]


def ours(folder: Path) -> list[str]:
    """What the manifest there lists, itself included; nothing if there is none."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [MANIFEST, *(name for name in listed if isinstance(name, str))] if isinstance(listed, list) else []


def write(folder: Path, files: Mapping[str, Content], force: bool) -> None:
    """Make the folder.

    Raises:
        BadInput: the place is taken or cannot be written; nothing was changed.
    """
    check_place(folder, force)
    folder = folder.absolute()
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.smelt-"))
    try:
        made.chmod(0o777 & ~umask())
        for name, content in files.items():
            place = made / inside(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(place)
            else:
                place.write_bytes(content.encode() if isinstance(content, str) else content)
            if name.endswith(".sh"):
                place.chmod(place.stat().st_mode | 0o111 & ~umask())
        exchange(made, folder)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def inside(name: str) -> PurePosixPath:
    """The relative path, which stays in the folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} leaves the folder")
    return path


def exchange(made: Path, folder: Path) -> None:
    """Put one in the place of the other; what stood there goes once the new one stands."""
    before = set_aside(folder)
    if folder.exists():
        folder.rename(before)
    try:
        made.rename(folder)
    except OSError:
        restore(folder)
        raise
    shutil.rmtree(before, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Where the former folder stands for the moment between two renames."""
    folder = folder.absolute()
    return folder.with_name(f".{folder.name}.smelt-before")


def restore(folder: Path) -> None:
    """Bring back a folder that a killed emission had set aside."""
    before = set_aside(folder)
    if before.is_dir() and not folder.exists():
        before.rename(folder)


def umask() -> int:
    """The process's; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
