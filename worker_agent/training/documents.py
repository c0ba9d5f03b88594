"""Real documents to train on without a download: the source files of the Python installation.

Guarantees: the same installation gives the same tokens, document by document; no document is cut or repeated
(one that is too short or too long is left out); lengths keep the shape that long-context data has, a mass of
short documents and a few very long ones. A corpus is prepared once, by one process, and cached under a
fingerprint of its source files and of the settings. Not a data pipeline: everything is held in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

FORMAT = 1
"""Changes when the same settings would give other tokens."""


@dataclass(frozen=True)
class CorpusConfig:
    """Which documents are taken, and how they are tokenised."""

    vocabulary: int = 2048
    """Entries of the byte-pair vocabulary that is trained on the documents, the separator included."""

    shortest: int = 24
    """Shortest document in tokens."""

    longest: int = 16_384
    """Longest document in tokens: the context length of the run."""

    documents: int = 768
    """Most documents. Bounds the time that preparing takes."""

    tail: float = 0.72
    """Documents in one octave of size over those in the octave below: 0.5 would give each octave equal tokens."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokenised documents: document i is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: npt.NDArray[np.uint16] = field(repr=False)
    offsets: npt.NDArray[np.int64] = field(repr=False)
    vocabulary: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, document: int) -> npt.NDArray[np.int64]:
        """Tokens of one document, int64, shape (length,)."""
        return self.tokens[self.offsets[document] : self.offsets[document + 1]].astype(np.int64)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    @property
    def digest(self) -> str:
        """BLAKE2b-128 of the tokens and where each document ends, in hexadecimal."""
        state = hashlib.blake2b(self.offsets.tobytes(), digest_size=16)
        state.update(self.tokens.tobytes())
        return state.hexdigest()

    @classmethod
    def load(cls, path: Path) -> Documents:
        """Read what `prepare_documents` wrote."""
        with np.load(path) as stored:
            return cls(stored["tokens"], stored["offsets"], int(stored["vocabulary"]), str(stored["fingerprint"]))

    def save(self, path: Path) -> None:
        """Write so that a reader sees the old file or the new one, never a part."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(
            f".{path.name}.{secrets.token_hex(8)}"
        )  # nodes that share the folder may write at once
        with partial.open("wb") as file:
            np.savez(
                file,
                tokens=self.tokens,
                offsets=self.offsets,
                vocabulary=self.vocabulary,
                fingerprint=self.fingerprint,
            )
        partial.replace(path)


def prepare_documents(path: Path, config: CorpusConfig | None = None, source: Path | None = None) -> Documents:
    """The documents at `path`, tokenised anew if they are missing or were made from other files or settings.

    `source` is a folder of .py files, by default the standard library of this Python. Takes seconds the first
    time. Raises `FileNotFoundError` if the folder holds no usable file.
    """
    config = config or CorpusConfig()
    source = source or Path(sysconfig.get_path("stdlib"))
    files = _choose(source, config)
    if not files:
        raise FileNotFoundError(f"no Python source file of a usable size under {source}: name another folder")
    fingerprint = _fingerprint(source, files, config)
    if path.exists():
        cached = Documents.load(path)
        if cached.fingerprint == fingerprint:
            return cached
    documents = _tokenise(files, config, fingerprint)
    documents.save(path)
    return documents


BYTES_PER_TOKEN = 3.4
"""Roughly what a vocabulary of some thousand entries reaches on Python source; only sorts files into octaves."""


def _choose(source: Path, config: CorpusConfig) -> list[Path]:
    """Share `config.documents` out over the octaves of size, each getting `tail` times as many as the one below.

    An octave with fewer files gives what it has. Inside an octave the digest of the name decides, so that the
    choice is spread over the folders and does not depend on the file system's order.
    """
    octaves: dict[int, list[Path]] = {}
    for file in _source_files(source):
        tokens = file.stat().st_size / BYTES_PER_TOKEN
        if config.shortest <= tokens <= config.longest:
            octaves.setdefault(int(np.log2(tokens)), []).append(file)
    if not octaves:
        return []
    lowest = min(octaves)
    shares = {octave: config.tail ** (octave - lowest) for octave in octaves}
    unit = config.documents / sum(shares.values())
    chosen: list[Path] = []
    for octave, files in sorted(octaves.items()):
        by_name = sorted(files, key=lambda file: _digest(file.relative_to(source).as_posix()))
        chosen += by_name[: max(1, round(unit * shares[octave]))]
    return sorted(chosen)


def _source_files(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _fingerprint(source: Path, files: list[Path], config: CorpusConfig) -> str:
    named = [(file.relative_to(source).as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _digest(json.dumps([FORMAT, asdict(config), named]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _tokenise(files: list[Path], config: CorpusConfig, fingerprint: str) -> Documents:
    """Train a byte-pair vocabulary on the files, encode them, and keep those whose length is in range."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        special_tokens=["<document>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    start = tokenizer.token_to_id("<document>")
    encoded = [np.array([start, *encoding.ids], np.uint16) for encoding in tokenizer.encode_batch(texts)]
    kept = [tokens for tokens in encoded if config.shortest <= len(tokens) <= config.longest]
    offsets = np.concatenate(([0], np.cumsum([len(tokens) for tokens in kept]))).astype(np.int64)
    return Documents(np.concatenate(kept), offsets, config.vocabulary, fingerprint)
