"""Reading sequence lengths from the files that people have them in.

| file | lengths |
|---|---|
| `.txt`, or `-` for standard input | one integer a line; empty lines are skipped |
| `.npy` | an array of one dimension |
| `.json` | a list |
| `.jsonl` | the number under `field` in each line's object |
| `.parquet` | the column `field`; needs the extra [parquet] |
| `.idx` | the sequence lengths of a Megatron indexed data set |

Every error names the file and, where there is one, the line.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_service.domain import Batch, InvalidInputError, Reason

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_VERSION = 1
MEGATRON_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token type, number of sequences, number of documents. Then follow the sequence
lengths (int32), their byte offsets (int64) and the documents' first sequences (int64). Layout as written by
Megatron-Core, megatron/core/datasets/indexed_dataset.py."""


class _Lengths(NamedTuple):
    values: npt.NDArray[Any]
    lines: list[int] | None = None
    """Line of each length, from 1, where the file has lines."""


def read_batch(source: str, field: str | None = None) -> Batch:
    """The lengths in the file `source`, in its order; `-` reads text from standard input.

    Raises `InvalidInputError` for a file that cannot be read or parsed, and for a length that is none.
    """
    if source == "-":
        name = "standard input"
        lengths = _text(_standard_input(), name)
    else:
        name, lengths = source, _read(Path(source), field)
    try:
        return Batch(lengths.values)
    except InvalidInputError as error:
        place = name
        if lengths.lines is not None and error.sequence is not None:
            place = f"line {lengths.lines[error.sequence]} of {name}"
        raise InvalidInputError(error.reason, f"{place}: {error}", sequence=error.sequence) from None


def _read(path: Path, field: str | None) -> _Lengths:
    readers: dict[str, Callable[[Path, str | None], _Lengths]] = {
        ".txt": lambda path, _: _text(_read_text(path), str(path)),
        ".npy": lambda path, _: _npy(path),
        ".json": lambda path, _: _json(path),
        ".jsonl": _jsonl,
        ".parquet": _parquet,
        ".idx": lambda path, _: _megatron_index(path),
    }
    if path.suffix not in readers:
        raise _invalid(f"{path}: cannot tell its format from its name; the known ones are {', '.join(readers)}")
    try:
        return readers[path.suffix](path, field)
    except OSError as error:
        raise _invalid(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _invalid(f"{path}: is no text file: {error}") from error


def _standard_input() -> str:
    if sys.stdin is None:
        raise _invalid("standard input is closed; pipe the lengths in, or name a file")
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"standard input: is no text: {error}") from error


def _read_text(path: Path) -> str:
    """UTF-8 whatever the locale, with or without the mark that some editors put before it."""
    return path.read_text(encoding="utf-8-sig")


def _text(text: str, name: str) -> _Lengths:
    values, lines = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values.append(int(line))
        except ValueError:
            raise _invalid(f"line {number} of {name}: {line.strip()[:80]!r} is no integer") from None
        lines.append(number)
    return _Lengths(np.array(values), lines)


def _npy(path: Path) -> _Lengths:
    try:
        values = np.load(path, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a damaged header is read as Python, and may raise anything
        raise _invalid(f"{path}: is no .npy file of numbers: {error}") from error
    if not isinstance(values, np.ndarray):
        raise _invalid(f"{path}: holds several arrays; save the lengths alone with numpy.save")
    return _Lengths(values)


def _json(path: Path) -> _Lengths:
    text = _read_text(path)
    try:
        values = _parsed(text)
    except json.JSONDecodeError as error:
        raise _invalid(f"line {error.lineno} of {path}: {error.msg}") from error
    except ValueError as error:
        raise _invalid(f"{path}: {error}") from error
    if not isinstance(values, list):
        raise _invalid(f"{path}: holds {_kind(values)}, not a list of lengths")
    return _Lengths(np.array(values, dtype=object))


def _jsonl(path: Path, field: str | None) -> _Lengths:
    wanted = _required(field, path)
    values, lines = [], []
    # Not `splitlines`: JSON texts may hold other separators of lines, such as U+2028.
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = _parsed(line)
        except json.JSONDecodeError as error:
            raise _invalid(f"line {number} of {path}: {error.msg}") from error
        except ValueError as error:
            raise _invalid(f"line {number} of {path}: {error}") from error
        if not isinstance(row, dict) or wanted not in row:
            raise _invalid(f"line {number} of {path}: holds no field {wanted!r}")
        values.append(row[wanted])
        lines.append(number)
    return _Lengths(np.array(values, dtype=object), lines)


def _parsed(text: str) -> Any:
    """The value that a JSON text holds. Raises `ValueError`, also for what Python's parser gives up on."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise ValueError("is nested too deeply, or holds a number of thousands of digits") from error


def _parquet(path: Path, field: str | None) -> _Lengths:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise _invalid(f"{path}: reading Parquet needs pyarrow: install 'hydra-cp[parquet]'") from error
    wanted = _required(field, path)
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if wanted not in file.schema_arrow.names:
            raise _invalid(f"{path}: has no column {wanted!r}; it has {', '.join(file.schema_arrow.names)}")
        if file.schema_arrow.names.count(wanted) > 1:
            raise _invalid(f"{path}: has several columns {wanted!r}; give the one with the lengths a name of its own")
        return _Lengths(file.read(columns=[wanted])[wanted].to_numpy())
    except pyarrow.ArrowException as error:
        raise _invalid(f"{path}: is no readable Parquet file: {error}") from error


def _megatron_index(path: Path) -> _Lengths:
    content = path.read_bytes()
    if len(content) < MEGATRON_HEADER.size or not content.startswith(MEGATRON_MAGIC):
        raise _invalid(f"{path}: does not begin like a Megatron index")
    _, version, _, sequences, _ = MEGATRON_HEADER.unpack_from(content)
    if version != MEGATRON_VERSION:
        raise _invalid(f"{path}: is a Megatron index of version {version}; this reads version {MEGATRON_VERSION}")
    if len(content) < MEGATRON_HEADER.size + 4 * sequences:
        raise _invalid(f"{path}: is cut short; its header promises {sequences:,} sequences")
    return _Lengths(np.frombuffer(content, "<i4", sequences, MEGATRON_HEADER.size))


def _required(field: str | None, path: Path) -> str:
    if field is None:
        raise _invalid(f"{path}: say with --field which field holds the lengths")
    return field


def _kind(value: object) -> str:
    names = {dict: "an object", str: "a text", type(None): "null"}
    return names.get(type(value), f"the value {value!r}")


def _invalid(message: str) -> InvalidInputError:
    return InvalidInputError(Reason.INVALID_ARGUMENT, message)
