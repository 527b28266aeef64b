"""How does a result reach the disk? Whole or not at all, and never over something that was there.

Text goes to a temporary file beside its place, is flushed, and is then renamed into it.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

from smelt_budget.errors import BadInput


def check_free(path: Path, force: bool) -> None:
    """Fail before the work, not after it: the place is taken, or cannot be written."""
    folder = path.absolute().parent
    try:
        if path.is_dir():
            raise BadInput(f"{path} is a directory", f"fix: --out {shlex.quote(str(path / 'smelt.yaml'))}")
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is a device or a pipe, which is never replaced", "fix: another --out")
        if path.exists() and not force:
            raise BadInput(f"{path} exists and is not overwritten", "fix: --force, or another --out")
        if not folder.exists() and not any(above.is_file() for above in folder.parents):
            raise BadInput(f"cannot write {path}: no such directory", f"fix: mkdir -p {shlex.quote(str(path.parent))}")
        if not folder.is_dir():
            raise BadInput(f"cannot write {path}: {folder} is not a directory", "fix: another --out")
        if not os.access(folder, os.W_OK):
            raise BadInput(f"cannot write {path}: the directory is not writable", "fix: another --out")
        path.resolve(strict=False)
    except (OSError, RuntimeError) as error:  # a name too long, a link to itself
        raise BadInput(f"cannot write {str(path)[:80]}: {getattr(error, 'strerror', None) or error}") from None


def write_text(path: Path, text: str, force: bool) -> None:
    """Write atomically; without `force` a file that appeared meanwhile is kept."""
    check_free(path, force)
    path = path.resolve()  # a link stays a link; what it points to is replaced
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=".smelt-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o666 & ~current_umask())
            if force:
                Path(name).replace(path)
            else:
                claim(path)
                Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except FileExistsError:
        raise BadInput(f"{path} exists and is not overwritten", "fix: --force, or another --out") from None
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror or error}") from None


def claim(path: Path) -> None:
    """Make the file, empty, only if there is none: then the rename over it can lose nobody's work."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def current_umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
