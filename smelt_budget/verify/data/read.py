"""What are the documents of a text source? One after another, never all in memory.

text             a directory's files, one document each; a lone file in pieces that end with a line
jsonl            a line, one field of it; plain, .gz, .zst
parquet          a row, one column of it (pyarrow)
dataset          a row of what `datasets` saved (datasets)
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from smelt_budget.errors import BadInput
from smelt_budget.verify.data.sources import Source, one_line

FIELDS = ("text", "content", "code")
"""Where the text is, unless `--text-field` says: C4, FineWeb, Dolma; The Stack; GitHub code."""
PIECES, SMALLEST, LARGEST = 64, 4096, 1 << 18
"""A lone file is cut into so many pieces, of so many bytes; a file in a directory only above `LARGEST` x 4."""
BLOCK = 1 << 16  # compressed bytes at once: zstd may make 10,000 times as many of them
ROWS = 1000  # read at once


class Reading(NamedTuple):
    """One document."""

    content: bytes
    """UTF-8, not empty."""
    done: int
    """Bytes of the source's files read so far."""


def documents(source: Source, text_field: str | None) -> Iterator[Reading]:
    """All of a source's documents; empty ones are left out.

    Raises:
        BadInput: a file that is not what its name says, not UTF-8, or without the field; with the place in it.
    """
    readers: dict[str, Callable[[Path], Iterator[Reading]]] = {
        "text": lambda path: text(path, lone=len(source.files) == 1),
        "jsonl": lambda path: lines(path, text_field),
        "parquet": lambda path: parquet(path, text_field),
        "dataset": lambda path: dataset(path, text_field, source.bytes),
    }
    before = 0
    for path in source.files:
        try:
            for content, done in readers[source.kind](path):
                if content:
                    yield Reading(content, before + done)
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror or error}") from None
        before += path.stat().st_size if path.is_file() else 0


def text(path: Path, lone: bool) -> Iterator[Reading]:
    """A text file, whole or in pieces that end with a line where there is one."""
    whole = path.stat().st_size
    size = min(max(whole // PIECES, SMALLEST), LARGEST) if lone else 4 * LARGEST
    with path.open("rb") as file:
        rest, done = b"", 0
        while block := file.read(size):
            piece = rest + block
            cut = len(piece)
            if file.tell() < whole:
                cut = piece.rfind(b"\n") + 1 or character_end(piece)
            done += cut
            yield Reading(utf8(piece[:cut], path, done - cut), done)
            rest = piece[cut:]
        if rest:
            yield Reading(utf8(rest, path, done), whole)


def character_end(piece: bytes) -> int:
    """Where the last UTF-8 character surely begins: continuation bytes are 10xxxxxx."""
    for cut in range(len(piece) - 1, max(len(piece) - 4, 0), -1):
        if piece[cut] & 0xC0 != 0x80:
            return cut
    return len(piece)


def utf8(content: bytes, path: Path, offset: int) -> bytes:
    """The same bytes, if they decode."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8: byte {offset + error.start:,} is {content[error.start]:#04x}",
            "fix: iconv -f its-encoding -t utf-8; or leave the file out",
        ) from None
    return content


def lines(path: Path, text_field: str | None) -> Iterator[Reading]:
    """JSON lines."""
    field = text_field
    with path.open("rb") as raw:
        try:
            for number, line in enumerate(opened(path, raw), 1):
                if not line.strip():
                    continue
                record = parsed(line, f"{path}:{number}")
                field = field or field_of(record, f"{path}:{number}")
                if field not in record:
                    raise BadInput(
                        f"{path}:{number} has no {field!r}; it has {', '.join(map(repr, record))[:120]}",
                        "fix: --text-field",
                    )
                yield Reading(encoded(record[field], f"{path}:{number}: {field}"), raw.tell())
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise BadInput(f"{path} is broken gzip: {error}") from None


def opened(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """Lines of a file, decompressed as its suffix says."""
    if path.suffix == ".gz":
        return iter(gzip.GzipFile(fileobj=raw))
    if path.suffix == ".zst":
        return unzstd(path, raw)
    return iter(raw.readline, b"")  # unlike iteration it allows `tell`


def unzstd(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """Lines of a Zstandard file; `zstandard`'s own reader takes a cut file for a short one."""
    zstandard = needed("zstandard", path)
    frame, rest = zstandard.ZstdDecompressor().decompressobj(), b""
    begun = False
    try:
        while block := raw.read(BLOCK):
            while block:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                begun = True
                *whole, rest = (rest + frame.decompress(block)).split(b"\n")
                yield from whole
                block = frame.unused_data if frame.eof else b""
    except zstandard.ZstdError as error:
        raise BadInput(f"{path} is broken zstd: {error}") from None
    if begun and not frame.eof:
        raise BadInput(f"{path} is broken zstd: it ends in the middle of a frame")
    if rest:
        yield rest


def parsed(line: bytes, place: str) -> dict[str, Any]:
    """One JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{place} is not JSON: {one_line(error)}") from None
    if not isinstance(record, dict):
        raise BadInput(
            f"{place} is {type(record).__name__}, not an object", "fix: one JSON object a line, as in JSON lines"
        )
    return record


def field_of(record: dict[str, Any], place: str) -> str:
    """The first of `FIELDS` that is there."""
    for field in FIELDS:
        if field in record:
            return field
    raise BadInput(
        f"{place}: which field is the text? There are {', '.join(map(repr, record))[:200]}", "fix: --text-field"
    )


def encoded(value: Any, place: str) -> bytes:
    """A field's text; null is none."""
    if value is None:
        return b""
    if not isinstance(value, str):
        raise BadInput(f"{place} is {type(value).__name__}, not text", "fix: --text-field")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{place} holds half a surrogate pair, which is no text") from None


def parquet(path: Path, text_field: str | None) -> Iterator[Reading]:
    """One column of a Parquet file."""
    needed("pyarrow", path)
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            field = column_of(schema.names, text_field, path)
            per_row = path.stat().st_size / max(rows, 1)
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield Reading(encoded(value, f"{path} row {row}: {field}"), int(row * per_row))
    except BadInput:
        raise
    except Exception as error:  # pyarrow raises its own kinds, OSError, UnicodeDecodeError, ...
        raise BadInput(f"{path} cannot be read after row {row:,}: {one_line(error)}") from None


def dataset(path: Path, text_field: str | None, size: int) -> Iterator[Reading]:
    """One column of a dataset that `datasets` saved to disk."""
    datasets = needed("datasets", path)
    row = 0
    try:
        loaded = datasets.load_from_disk(str(path)).with_format(None)  # a saved torch format would import torch
        field = column_of(loaded.column_names, text_field, path)
        for batch in loaded.select_columns([field]).iter(ROWS):
            for value in batch[field]:
                row += 1
                yield Reading(encoded(value, f"{path} row {row}: {field}"), row * size // len(loaded))
    except BadInput:
        raise
    except Exception as error:  # damaged metadata raises AttributeError, KeyError, TypeError, ArrowInvalid, ...
        raise BadInput(f"{path} is no dataset that `datasets` reads: {one_line(error)}") from None


def column_of(names: list[str], text_field: str | None, path: Path) -> str:
    """The column with the text."""
    if text_field is None:
        return field_of(dict.fromkeys(names), str(path))
    if text_field not in names:
        raise BadInput(f"{path} has no {text_field!r}; it has {', '.join(map(repr, names))[:200]}", "fix: --text-field")
    return text_field


def needed(package: str, path: Path) -> Any:
    """The package, imported only where a file asks for it."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise BadInput(f"{path} needs {package}", "fix: pip install 'smelt-budget[data]'") from None
