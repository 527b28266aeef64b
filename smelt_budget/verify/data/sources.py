"""What does a `--data` argument name? A domain, one kind of data, and the files it lies in.

code=/data/stack        a name for the domain; without it the domain is called as the file
file or directory       the kind is told by the suffix, of a directory by what it holds
prefix                  of Megatron's prefix.bin and prefix.idx
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smelt_budget.errors import BadInput

Kind = Literal["text", "jsonl", "parquet", "dataset", "megatron", "tokens"]
SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".json", ".json.gz", ".json.zst"),
    "parquet": (".parquet",),
    "megatron": (".idx",),
    "tokens": (".npy",),
}
OTHER_SUFFIXES = {
    ".gz": "gunzip it; of compressed files only JSON lines are read",
    ".zst": "unzstd it; of compressed files only JSON lines are read",
    ".zip": "unzip it",
    ".tar": "unpack it",
    ".arrow": "--data with its directory, as save_to_disk wrote it",
    ".pkl": "export it as JSON lines; pickles are never opened",
    ".pt": "export it as .npy; pickles are never opened",
    ".csv": "export it as JSON lines or Parquet",
}
NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """One `--data` argument, found on disk."""

    domain: str
    path: Path
    kind: Kind
    files: tuple[Path, ...]
    """To be read in this order; of a dataset its directory."""
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """On disk, compressed as they are."""
        inside = [file for path in self.files for file in (walked(path) if path.is_dir() else [path])]
        return size_of(inside)

    @property
    def tokenised(self) -> bool:
        """Whether it holds ids instead of text."""
        return self.kind in ("megatron", "tokens")


def found(argument: str) -> Source:
    """The source that an argument names.

    Raises:
        BadInput: nothing there, or not one kind of data.
    """
    named = NAMED.fullmatch(argument)
    try:
        if named and not Path(argument).exists():
            domain, path = named[1], Path(named[2])
        else:
            domain, path = "", Path(argument)
        return read_directory(path, domain) if path.is_dir() else read_file(path, domain)
    except (OSError, ValueError) as error:  # not permitted; a name the system cannot hold
        raise BadInput(f"--data {argument[:120]}: {getattr(error, 'strerror', None) or error}") from None


def read_file(path: Path, domain: str) -> Source:
    """A file, or the prefix of a Megatron pair."""
    index = path.with_name(path.name + ".idx")
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        index = path.with_suffix(".idx")
    if index.is_file() and path.suffix != ".idx":
        return Source(domain or stem(path), path, "megatron", (index,))
    if not path.exists():
        raise missing(path)
    if not path.is_file():
        raise BadInput(f"{path} is a device or a pipe; data is read more than once", "fix: save it to a file")
    if not path.stat().st_size:
        raise BadInput(f"{path} is empty")
    if path.suffix == ".bin":
        return Source(domain or stem(path), path, "tokens", (path,))
    kind = kind_of(path)
    if kind == "text" and path.suffix in OTHER_SUFFIXES:
        raise BadInput(f"{path}: {path.suffix} is not read here", f"fix: {OTHER_SUFFIXES[path.suffix]}")
    if kind == "text" and is_binary(path):
        known = ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise BadInput(
            f"{path} has a zero byte among its first 8,000, so it is no UTF-8 text",
            f"fix: iconv -f utf-16 -t utf-8 if it is text; other data is known by its suffix: {known}",
        )
    return Source(domain or stem(path), path, kind, (path,))


def missing(path: Path) -> BadInput:
    """Nothing there; perhaps the name of a dataset on the hub."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        hint = f"hf download {path} --repo-type dataset --local-dir {path.name}, then --data {path.name}"
        return BadInput(f"there is no {path}", f"fix: if that is a dataset on the hub: {hint}")
    return BadInput(f"there is no {path}", "fix: --data with a file, a directory, or the prefix of .bin and .idx")


def read_directory(path: Path, domain: str) -> Source:
    """A saved dataset, or files of one kind."""
    domain = domain or path.resolve().name
    if (path / "dataset_dict.json").is_file():
        return Source(domain, path, "dataset", (split_of(path),))
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return Source(domain, path, "dataset", (path,))
    files = tuple(walked(path))
    by_kind: dict[Kind, tuple[Path, ...]] = {}
    for kind in SUFFIXES:
        chosen = tuple(file for file in files if kind_of(file) == kind)
        if chosen:
            by_kind[kind] = chosen
    loose = tuple(file for file in by_kind.get("jsonl", ()) if file.suffix == ".json")
    if loose and (len(by_kind) > 1 or len(loose) < len(files)):  # metadata beside the data, or a tree of text
        by_kind["jsonl"] = tuple(file for file in by_kind["jsonl"] if file not in loose)
        by_kind = {kind: chosen for kind, chosen in by_kind.items() if chosen}
    if len(by_kind) > 1:
        held = " and ".join(f"{len(chosen)} of {kind}" for kind, chosen in by_kind.items())
        raise BadInput(f"{path} holds {held} files", "fix: one --data for each, naming files or inner directories")
    for kind, chosen in by_kind.items():
        return structured(path, domain, kind, chosen, files)
    texts = tuple(file for file in files if not is_binary(file))
    if not texts:
        raise BadInput(f"{path} holds no file that can be read", "fix: --data with text, JSON lines, Parquet or tokens")
    notes = (f"{path}: {len(files) - len(texts)} binary files left out",) if len(texts) < len(files) else ()
    return Source(domain, path, "text", texts, notes)


def structured(path: Path, domain: str, kind: Kind, chosen: tuple[Path, ...], files: tuple[Path, ...]) -> Source:
    """Files of one kind that are most of the directory; of a hub repository's splits, the one called train."""
    others = [file for file in files if file not in chosen and not (kind == "megatron" and file.suffix == ".bin")]
    if size_of(others) > size_of(chosen):
        raise BadInput(
            f"{path} holds {len(chosen)} files of {kind}, and {len(others)} others that are larger",
            "fix: --data with the inner directory or the file that is meant",
        )
    notes = [f"{path}: {len(others)} files that are no {kind} left out"] if others else []
    training = tuple(file for file in chosen if file.name.startswith("train"))
    if training and len(training) < len(chosen):
        notes.append(f"{path}: read {len(training)} of {len(chosen)} files, those of the split train")
    return Source(domain, path, kind, training or chosen, tuple(notes))


def size_of(files: Iterable[Path]) -> int:
    """Bytes on disk."""
    return sum(file.stat().st_size for file in files)


def one_line(error: Exception) -> str:
    """What another library said, short enough for a message of ours."""
    return " ".join(str(error).split())[:160]


def split_of(path: Path) -> Path:
    """The directory of `train`, or of the only split, of a saved DatasetDict."""
    try:
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        splits = [str(split) for split in splits]
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{path / 'dataset_dict.json'} names no splits") from None
    if "train" in splits or len(splits) == 1:
        return path / ("train" if "train" in splits else splits[0])
    choices = " or ".join(f"--data {path / split}" for split in splits)
    raise BadInput(f"{path} has the splits {', '.join(splits)} and no train", f"fix: {choices}")


def kind_of(path: Path) -> Kind:
    """By suffix."""
    for kind, suffixes in SUFFIXES.items():
        if path.name.lower().endswith(suffixes):
            return kind
    return "text"


def walked(path: Path) -> list[Path]:
    """All files below, sorted; hidden ones and empty ones left out."""
    files = []
    for folder, inner, names in os.walk(path):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    return [file for file in files if file.is_file() and file.stat().st_size]


def is_binary(path: Path) -> bool:
    """A zero byte among the first 8,000, as git tells it."""
    with path.open("rb") as file:
        return b"\0" in file.read(8000)


def stem(path: Path) -> str:
    """The file's name without the suffixes read here."""
    name = path.name
    for suffix in sorted((s for each in SUFFIXES.values() for s in each), key=len, reverse=True):
        if name.lower().endswith(suffix) and len(name) > len(suffix):
            return name[: -len(suffix)]
    return path.stem
