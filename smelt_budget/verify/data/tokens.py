"""What are the documents of a source that holds ids? Stretches of memory-mapped arrays; nothing is copied.

Megatron    prefix.idx says where documents begin in prefix.bin. Layout (megatron-core 0.16.1,
            core/datasets/indexed_dataset.py, `_IndexWriter`), little-endian:
                9 s   MMIDIDX 0 0        Q  version, 1       B  kind of number       Q  sequences S      Q  n
                S i4  lengths            S i8  byte offsets into .bin               n i8  first sequence of each
                document, and S
            Its own class is not used: importing it imports all of megatron.core, 7 s of torch.
OLMo        .npy without numpy's header, one id after another (OLMo-core, data/utils.py): `--token-dtype` is needed
numpy       .npy with its header, 1-D, an integer kind

Without an index, documents are what lies between two BOS. BOS at a document's edges is dropped in all kinds, and an
end-of-text id that is the same as BOS with it; packing puts one before each document.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from smelt_budget.errors import BadInput
from smelt_budget.verify.data.documents import Documents, key_of
from smelt_budget.verify.data.sources import Source, one_line

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
KINDS = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Megatron's codes; 6 and 7 are floats, which are no ids."""
NUMPY_MAGIC = b"\x93NUMPY"
LLM_C_MAGIC = struct.pack("<i", 20240520)  # karpathy/llm.c, dev/data/data_common.py: 256 int32, then uint16
CHUNK = 1 << 24  # ids looked at together


def documents(
    source: Source, token_dtype: str | None, vocab_size: int, bos_id: int, most: int | None = None
) -> Documents:
    """All documents of a source, or those of the first `most` ids of each file.

    Raises:
        BadInput: a damaged file, an id outside the vocabulary, or no way to tell documents apart.
    """
    parts, part, start, length = [], [], [], []
    for path in source.files:
        try:
            if source.kind == "megatron":
                ids, first, count = megatron(path)
            else:
                ids = numbers(path, token_dtype)
                first, count = between(ids[:most], bos_id, path)
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror or error}") from None
        if most is not None:
            first, count = first[first + count <= most], count[first + count <= most]
        check_ids(ids, first, count, vocab_size, path)
        first, count = without_edges(ids, first, count, bos_id)
        parts.append(ids)
        part.append(np.full(len(first), len(parts) - 1))
        start.append(first)
        length.append(count)
    where = (np.concatenate(part), np.concatenate(start), np.concatenate(length))
    keys = (key_of(parts[p][s : s + n].astype("<u4").tobytes()) for p, s, n in zip(*where, strict=True))
    return Documents(
        tuple(parts),
        *where,
        bytes=np.full(len(where[0]), -1),
        key=np.fromiter(keys, np.uint64, len(where[0])),
        domain=np.zeros(len(where[0]), np.int64),
    )


def megatron(index: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, first, count): documents of prefix.idx in prefix.bin."""
    raw = index.read_bytes()
    if raw[:9] != MAGIC:
        raise BadInput(f"{index} is no Megatron index: it begins with {raw[:9]!r}, not {MAGIC!r}")
    if len(raw) < 9 + HEADER.size:
        raise BadInput(f"{index} ends after {len(raw)} bytes, inside its header")
    version, code, sequences, ends = HEADER.unpack_from(raw, 9)
    if version != 1:
        raise BadInput(f"{index} has version {version}; Megatron wrote only 1")
    if code not in KINDS:
        raise BadInput(
            f"{index} holds numbers of kind {code}, which are no ids", f"read here: {', '.join(map(str, KINDS))}"
        )
    expected = 9 + HEADER.size + 12 * sequences + 8 * ends
    if len(raw) != expected:
        raise BadInput(
            f"{index} has {len(raw):,} bytes; {sequences:,} sequences and {ends:,} document ends make {expected:,}",
            "fix: copy it again; indices of multimodal data are not read here",
        )
    kind = np.dtype(KINDS[code]).newbyteorder("<")
    at = 9 + HEADER.size
    lengths = np.frombuffer(raw, "<i4", sequences, at).astype(np.int64)
    offsets = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
    bounds = np.frombuffer(raw, "<i8", ends, at + 12 * sequences)
    data = index.with_suffix(".bin")
    if not data.is_file():
        raise BadInput(f"{index} has no {data.name} beside it")
    ids = mapped(data, kind)
    if (lengths < 0).any() or (offsets != (np.cumsum(lengths) - lengths) * kind.itemsize).any():
        raise BadInput(f"{index}: its sequences do not lie one after another, as Megatron writes them")
    if lengths.sum() != len(ids):
        raise BadInput(f"{data} holds {len(ids):,} ids, its index says {int(lengths.sum()):,}", "fix: copy both again")
    if ends < 2 or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise BadInput(f"{index}: its document ends do not cover its {sequences:,} sequences")
    places = np.append(0, np.cumsum(lengths))[bounds]
    return ids, places[:-1], np.diff(places)


def numbers(path: Path, token_dtype: str | None) -> np.ndarray:
    """The ids of an array with numpy's header, or of a raw one."""
    with path.open("rb") as file:
        beginning = file.read(8)
    if not beginning:
        raise BadInput(f"{path} is empty")
    if beginning.startswith(NUMPY_MAGIC):
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError:
            raise
        except Exception as error:  # a damaged header raises ValueError, SyntaxError, TokenError, ...
            raise BadInput(f"{path} cannot be mapped: {one_line(error)}") from None
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise BadInput(f"{path} is an array {ids.shape} of {ids.dtype}, not a row of ids")
        return np.asarray(ids)
    if beginning.startswith(LLM_C_MAGIC):
        raise BadInput(
            f"{path} has llm.c's header, which is not read here", "fix: tail -c +1025, and --token-dtype uint16"
        )
    if token_dtype is None:
        raise BadInput(
            f"{path} has no header, as OLMo writes it: how wide is an id?", "fix: --token-dtype uint16, or uint32"
        )
    if token_dtype not in ("uint16", "uint32"):
        raise BadInput(f"--token-dtype {token_dtype!r:.40} is neither uint16 nor uint32")
    return mapped(path, np.dtype(token_dtype).newbyteorder("<"))


def mapped(path: Path, kind: np.dtype) -> np.ndarray:
    """A file of nothing but numbers."""
    size = path.stat().st_size
    if not size or size % kind.itemsize:
        raise BadInput(f"{path} has {size:,} bytes, which are no whole number of {kind.name}")
    return np.asarray(np.memmap(path, kind, "r"))


def between(ids: np.ndarray, bos_id: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(first, count) of what lies between two BOS; what follows the last one counts too."""
    chunks = range(0, len(ids), CHUNK)
    marks = np.concatenate([np.flatnonzero(ids[at : at + CHUNK] == bos_id) + at for at in chunks])
    if not len(marks):
        raise BadInput(
            f"{path}: id {bos_id} is nowhere among {len(ids):,}, so documents cannot be told apart",
            "fix: --bos-id with the id that begins or ends each document",
        )
    first = np.append(0, marks + 1)
    return first, np.append(marks, len(ids)) - first


def without_edges(ids: np.ndarray, first: np.ndarray, count: np.ndarray, bos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents without BOS at their beginning or end; what is then empty is left out."""
    while len(first := first[count > 0]):
        count = count[count > 0]
        front = ids[first] == bos_id
        back = ~front & (ids[first + count - 1] == bos_id)
        if not (front | back).any():
            break
        first, count = first + front, count - front - back
    return first, count[count > 0]


def check_ids(ids: np.ndarray, first: np.ndarray, count: np.ndarray, vocab_size: int, path: Path) -> None:
    """All ids are in [0, vocab_size)."""
    end = int((first + count).max()) if len(first) else 0
    for at in range(0, end, CHUNK):
        chunk = ids[at : min(at + CHUNK, end)]
        wrong = np.flatnonzero((chunk >= vocab_size) | (chunk < 0))
        if len(wrong):
            place = at + int(wrong[0])
            raise BadInput(
                f"{path}: id {place:,} is {int(ids[place])}, not below the vocabulary's {vocab_size:,}",
                "fix: --vocab-size, or the --token-dtype it was written with",
            )
