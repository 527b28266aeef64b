"""Where do the ids of a text go? Into memory while they are few; else, once, into a file that later runs map.

A place is a directory of the caller's cache: tokens.npy, documents.npz. It is written under another name and renamed,
so it is there whole or not at all, and two processes that write it at once do no harm.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.verify.data.documents import Documents, laid_out
from smelt_budget.verify.data.tokenise import Bytes, Tokeniser

VERSION = 1  # of what a place holds; another one is another place
BATCH = 1 << 22  # bytes of text given to the tokeniser at once: all its threads have work
IN_MEMORY = 1 << 26  # bytes of ids; the built-in text as bytes is 30 MB
COLUMNS = ("length", "bytes", "key")

Advanced = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while long work goes on."""


class Piece(NamedTuple):
    """A document on its way to the tokeniser."""

    content: bytes
    key: int
    done: int
    """Bytes of all files read so far."""


def place(cache: Path, *facts: Any) -> Path:
    """The directory in `cache` for ids that depend on these facts and on nothing else."""
    text = json.dumps([VERSION, *facts], default=str)
    return cache / f"tokens-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def file_facts(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of each file: what tells one content from another without reading it."""
    stats = [(path.resolve(), path.stat()) for path in files]
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def tokenised(
    pieces: Iterable[Piece],
    total: int,
    tokeniser: Tokeniser,
    at: Path,
    most: int | None = None,
    advanced: Advanced | None = None,
) -> Documents:
    """Ids of all pieces, from `at` if they are there already; stops after `most` ids.

    Raises:
        BadInput: the cache cannot be written.
    """
    ready = opened(at)
    if ready is not None:
        return ready
    try:
        with Growing(at, tokeniser.dtype) as growing:
            for batch in batches(pieces):
                growing.add(tokeniser.encode([piece.content for piece in batch]), batch)
                if advanced is not None:
                    advanced(min(batch[-1].done, total), total)
                if most is not None and growing.tokens >= most:
                    break
            if growing.file is None and isinstance(tokeniser, Bytes):
                return growing.in_memory()
            growing.keep()
    except OSError as error:
        raise BadInput(f"cannot write {at}: {error.strerror or error}", "fix: another place for the cache") from None
    kept = opened(at)
    if kept is None:
        raise BadInput(f"{at} was written and cannot be read back", "fix: another place for the cache")
    return kept


def batches(pieces: Iterable[Piece]) -> Iterable[list[Piece]]:
    """Lists of about `BATCH` bytes."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.content)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def opened(at: Path) -> Documents | None:
    """What a place holds; None where it is not there or damaged."""
    try:
        tokens = np.load(at / "tokens.npy", mmap_mode="r", allow_pickle=False)
        with np.load(at / "documents.npz", allow_pickle=False) as columns:
            length, sizes, key = (columns[name] for name in COLUMNS)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None
    return laid_out(tokens, length, sizes, key) if length.sum() == len(tokens) else None


class Growing:
    """Ids that move to a file once they are many; as a context it leaves nothing behind unless kept."""

    def __init__(self, at: Path, dtype: np.dtype[Any]):
        self.at = at
        self.dtype = dtype
        self.held: list[np.ndarray] = []
        self.columns: list[tuple[int, int, int]] = []
        self.tokens = 0
        self.folder: Path | None = None
        self.file: BinaryIO | None = None

    def __enter__(self) -> Growing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.file.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, ids: Sequence[np.ndarray], pieces: Sequence[Piece]) -> None:
        """Ids of some more documents."""
        self.held.extend(ids)
        self.columns += [(len(i), len(p.content), p.key) for i, p in zip(ids, pieces, strict=True)]
        self.tokens += sum(map(len, ids))
        if sum(each.nbytes for each in self.held) > IN_MEMORY:
            self.spill()

    def spill(self) -> None:
        """Move what is held to the file."""
        if self.file is None:
            self.at.parent.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(dir=self.at.parent, prefix=".tokens-"))
            self.file = (self.folder / "tokens.npy").open("wb")
            self.header(0)
        for each in self.held:
            self.file.write(each.astype(self.dtype, copy=False).tobytes())
        self.held.clear()

    def header(self, count: int) -> int:
        """Numpy's header for so many ids; numpy leaves room in it for the count to grow. Its length."""
        assert self.file is not None
        self.file.seek(0)
        shape = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(self.file, shape)
        return self.file.tell()

    def keep(self) -> None:
        """Rename the finished directory to its place; one that another process finished first stays."""
        self.spill()
        assert self.file is not None
        assert self.folder is not None
        if self.header(self.tokens) != self.header(0) or self.header(self.tokens) % 64:
            raise OSError("numpy's header has no room for the count")
        self.file.close()
        length, sizes, key = self.arrays()
        np.savez(self.folder / "documents.npz", length=length, bytes=sizes, key=key)
        if self.at.exists() and opened(self.at) is None:
            shutil.rmtree(self.at)
        try:
            os.rename(self.folder, self.at)  # noqa: PTH104  Path.rename would do the same; the directory's errors differ
        except OSError:
            if opened(self.at) is None:
                raise

    def in_memory(self) -> Documents:
        """The few ids, without a file."""
        return laid_out(np.concatenate([np.empty(0, self.dtype), *self.held]), *self.arrays())

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(length, bytes, key) of all documents."""
        length, sizes, keys = zip(*self.columns, strict=True) if self.columns else ((), (), ())
        return np.array(length, np.int64), np.array(sizes, np.int64), np.array(keys, np.uint64)
