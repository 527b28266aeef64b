"""What is a token? A byte, unless a tokenizer.json says otherwise.

Bytes: 256 of them and one BOS, so the output head stays small beside the experts and the budget honest; a 4,096-way
head was 42 % of a 2 M-parameter model's FLOPs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from smelt_budget.errors import BadInput

BEGINNINGS = (
    "<s>", "<bos>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<|startoftext|>", "[BOS]", "<|bos|>", "[gMASK]",
    "<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[EOS]", "<|eos|>",
)  # fmt: skip
"""Special tokens that stand between documents, in order of preference: Llama 2, Gemma, Llama 3, DeepSeek, gpt-oss,
Kimi, nanochat, GLM, GPT-2 and those that, like it, have only an end."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # byte fallback of SentencePiece vocabularies


class Tokeniser(Protocol):
    """Text to ids and back."""

    vocab_size: int
    bos_id: int
    dtype: np.dtype[Any]
    """Narrowest kind that holds every id."""
    token_bytes: np.ndarray | None
    """[V] bytes of text behind each id, 0 for special tokens; None where a token alone does not say."""
    digest: str
    """Equal only for tokenisers that encode alike."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of each text, no BOS."""
        ...

    def decode(self, ids: np.ndarray) -> bytes:
        """The text behind ids; special tokens are nothing."""
        ...

    def describe(self) -> dict[str, Any]:
        """For the report."""
        ...


class Bytes:
    """Ids 0-255 are bytes, 256 is BOS."""

    vocab_size = 257
    bos_id = 256
    dtype = np.dtype(np.uint8)  # a BOS is never stored
    token_bytes: np.ndarray | None = np.append(np.ones(256, np.int64), 0)
    digest = "bytes"

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Views of the bytes themselves."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> bytes:
        """BOS is nothing."""
        ids = np.asarray(ids)
        return ids[ids != self.bos_id].astype(np.uint8).tobytes()

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {"tokens": "bytes", "vocab_size": self.vocab_size, "bos_id": self.bos_id}


class Subwords:
    """A tokenizer.json, through the `tokenizers` library."""

    def __init__(self, path: Path, bos_id: int | None = None):
        """`path` may be the directory that holds the tokenizer.json.

        Raises:
            BadInput: no such file, not read by `tokenizers`, or no token that begins documents.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise BadInput(f"{path} needs tokenizers", "fix: pip install 'smelt-budget[data]'") from None
        self.path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = self.path.read_bytes()
            self.inner = Tokenizer.from_buffer(content)
        except OSError as error:
            raise BadInput(f"cannot read the tokenizer {self.path}: {error.strerror or error}") from None
        except Exception as error:  # what `tokenizers` raises is a bare Exception
            raise BadInput(f"{self.path} is no tokenizer.json: {str(error)[:120]}") from None
        self.inner.no_truncation()  # some published files cut at 512 or 2,048 tokens
        self.inner.no_padding()
        self.inner.encode_special_tokens = True  # "<s>" in a text is three letters, not the beginning of a document
        self.digest = hashlib.sha256(content).hexdigest()
        words = self.inner.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(words.values(), default=-1)  # ids may have holes
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)
        self.bos_id = self.beginning(words) if bos_id is None else bos_id
        if not 0 <= self.bos_id < self.vocab_size:
            raise BadInput(f"--bos-id {bos_id} is not among the {self.vocab_size:,} ids of {self.path}")
        self.token_bytes = self.bytes_of_tokens(words)

    def beginning(self, words: dict[str, int]) -> int:
        """The special token that begins a document."""
        special = {token.content for token in self.inner.get_added_tokens_decoder().values()}
        found = next((words[token] for token in BEGINNINGS if token in special), None)
        if found is None:
            known = ", ".join(f"{token} {words[token]}" for token in sorted(special)[:8]) or "none"
            raise BadInput(
                f"{self.path}: which token begins a document? Its special tokens are {known}",
                "fix: --bos-id with the id of the one that stands between documents in training",
            )
        return found

    def bytes_of_tokens(self, words: dict[str, int]) -> np.ndarray | None:
        """[V], where the decoder maps each token to its bytes: byte-level BPE, and SentencePiece with byte fallback."""
        decoder = repr(self.inner.decoder)
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, number in words.items():
            if "ByteLevel" in decoder:
                sizes[number] = len(token)  # one character stands for one byte
            elif "ByteFallback" in decoder:
                sizes[number] = 1 if BYTE_TOKEN.fullmatch(token) else len(token.replace("▁", " ").encode())
            else:
                return None
        for number, token in self.inner.get_added_tokens_decoder().items():
            sizes[number] = 0 if token.special or number == self.bos_id else len(token.content.encode())
        return sizes

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """As `tokenizers` does without special tokens; all cores work."""
        encodings = self.inner.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> bytes:
        """As `tokenizers` does; a cut character becomes U+FFFD."""
        return self.inner.decode(np.asarray(ids).tolist(), skip_special_tokens=True).encode()

    def describe(self) -> dict[str, Any]:
        """For the report."""
        return {
            "tokens": self.path.name,
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
            "sha256": self.digest,
        }
