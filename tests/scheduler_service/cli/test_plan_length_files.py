import io
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from scheduler_service.cli.length_files import read_batch
from scheduler_service.domain import InvalidInputError, Reason

LENGTHS = [5, 300, 16_777_216, 1]


def megatron_index(lengths: list[int], *, version: int = 1, promised: int | None = None) -> bytes:
    """As Megatron-Core writes it: header, lengths, pointers, document indices."""
    count = len(lengths) if promised is None else promised
    header = b"MMIDIDX\x00\x00" + struct.pack("<Q", version) + struct.pack("<B", 4)
    header += struct.pack("<Q", count) + struct.pack("<Q", len(lengths) + 1)
    pointers = np.cumsum([0, *lengths[:-1]]) * 4
    documents = np.arange(len(lengths) + 1)
    return (
        header
        + np.array(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + documents.astype("<i8").tobytes()
    )


def write(path: Path) -> Path:
    """LENGTHS in the format of the name."""
    match path.suffix:
        case ".txt":
            path.write_text("".join(f"{length}\n" for length in LENGTHS))
        case ".npy":
            np.save(path, np.array(LENGTHS, np.int32))
        case ".json":
            path.write_text(json.dumps(LENGTHS))
        case ".jsonl":
            path.write_text("".join(json.dumps({"text": "…", "tokens": length}) + "\n" for length in LENGTHS))
        case ".parquet":
            pa.parquet.write_table(pa.table({"tokens": LENGTHS, "id": list("abcd")}), path)
        case ".idx":
            path.write_bytes(megatron_index(LENGTHS))
    return path


@pytest.mark.parametrize("suffix", [".txt", ".npy", ".json", ".jsonl", ".parquet", ".idx"])
def test_reads_every_format_in_its_order(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"lengths{suffix}")
    assert read_batch(str(path), field="tokens").lengths.tolist() == LENGTHS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "5\n\n1.5\n", "line 3 of {path}: '1.5' is no integer"),
        ("a.txt", "5\nnan\n", "line 2 of {path}: 'nan' is no integer"),
        ("a.txt", "5\n\n0\n", "line 3 of {path}: sequence 1 has length 0"),
        ("a.txt", "5\n" + "9" * 30, "line 2 of {path}: sequence 1 has length"),
        ("a.txt", "5\n" + "9" * 5000, "line 2 of {path}: '999"),
        ("a.json", "[1, 1e400]", "{path}: sequence 1 has length inf"),
        ("a.json", f"[1, {10**20}]", f"{{path}}: sequence 1 has length {10**20}"),
        ("a.json", f"[{'9' * 5000}]", "{path}: is nested too deeply, or holds a number of thousands of digits"),
        ("a.json", "[" * 100_000, "{path}: is nested too deeply"),
        ("a.jsonl", '{"tokens": 1}\n' + "[" * 100_000, "line 2 of {path}: is nested too deeply"),
        ("a.txt", "", "{path}: the batch holds no sequence"),
        ("a.json", "[1,\n2,\n,]", "line 3 of {path}:"),
        ("a.json", '{"lengths": [1]}', "{path}: holds an object, not a list"),
        ("a.json", "[1, [2]]", "{path}: sequence 1 has length [2]"),
        ("a.json", '[1, "2"]', "{path}: sequence 1 has length '2'"),
        ("a.json", "[1, true]", "{path}: sequence 1 has length True"),
        ("a.json", "[1, NaN]", "{path}: sequence 1 has length nan"),
        ("a.json", "[[1, 2], [3, 4]]", "{path}: lengths must be a flat list"),
        ("a.jsonl", '{"tokens": 1}\n{"token": 2}\n', "line 2 of {path}: holds no field 'tokens'"),
        ("a.jsonl", '{"tokens": 1}\n{"tokens": 2\n', "line 2 of {path}:"),
        ("a.jsonl", '{"tokens": 1}\n\n{"tokens": -2}\n', "line 3 of {path}: sequence 1 has length -2"),
        ("a.jsonl", "7\n", "line 1 of {path}: holds no field 'tokens'"),
        ("a.npy", "no array", "{path}: is no .npy file"),
        ("a.parquet", "no table", "{path}: is no readable Parquet file"),
        ("a.idx", "no index", "{path}: does not begin like a Megatron index"),
        ("a.csv", "1,2", "{path}: cannot tell its format from its name; the known ones are .txt, .npy"),
    ],
)
def test_names_file_and_line_of_what_is_wrong(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InvalidInputError) as caught:
        read_batch(str(path), field="tokens")
    assert str(caught.value).startswith(message.format(path=path))


def test_separators_of_lines_inside_json_texts_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "a\u2028b\u0085c", "tokens": {length}}}\r\n' for length in LENGTHS))
    assert read_batch(str(path), field="tokens").lengths.tolist() == LENGTHS


@pytest.mark.parametrize("suffix", [".txt", ".json", ".jsonl"])
def test_a_byte_order_mark_is_no_content(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_batch(str(path), field="tokens").lengths.tolist() == LENGTHS


@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO(b"5\n\xff\n"), "utf-8")])
def test_standard_input_that_is_closed_or_no_text_is_named(
    monkeypatch: pytest.MonkeyPatch, stdin: io.TextIOWrapper | None
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(InvalidInputError, match="standard input"):
        read_batch("-")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none\.txt: No such file"):
        read_batch(str(tmp_path / "none.txt"))
    folder = tmp_path / "folder.txt"
    folder.mkdir()
    with pytest.raises(InvalidInputError, match=r"folder\.txt: Is a directory"):
        read_batch(str(folder))


def test_a_text_file_that_is_binary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="is no text file"):
        read_batch(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_format_with_fields_asks_for_the_field(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}")
    with pytest.raises(InvalidInputError, match="say with --field which field holds the lengths"):
        read_batch(str(path))


def test_a_parquet_column_that_is_missing_null_or_text_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    with pytest.raises(InvalidInputError, match="has no column 'length'; it has tokens, id"):
        read_batch(str(path), field="length")
    with pytest.raises(InvalidInputError, match="sequence 0 has length 'a'"):
        read_batch(str(path), field="id")
    pa.parquet.write_table(pa.table({"tokens": [1, None]}), path)
    with pytest.raises(InvalidInputError, match="sequence 1 has length nan"):
        read_batch(str(path), field="tokens")


def test_an_index_of_another_version_or_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.idx"
    path.write_bytes(megatron_index(LENGTHS, version=2))
    with pytest.raises(InvalidInputError, match="Megatron index of version 2"):
        read_batch(str(path))
    path.write_bytes(megatron_index(LENGTHS, promised=1000))
    with pytest.raises(InvalidInputError, match="is cut short; its header promises 1,000 sequences"):
        read_batch(str(path))


def test_an_archive_of_arrays_and_pickles_are_refused(tmp_path: Path) -> None:
    archive = tmp_path / "a.npz"
    np.savez(archive, lengths=LENGTHS)
    renamed = archive.rename(tmp_path / "a.npy")
    with pytest.raises(InvalidInputError, match="holds several arrays"):
        read_batch(str(renamed))
    np.save(renamed, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInputError, match=r"is no \.npy file of numbers"):
        read_batch(str(renamed))


def test_reads_standard_input_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("7\n8\n"))
    assert read_batch("-").lengths.tolist() == [7, 8]
    monkeypatch.setattr("sys.stdin", io.StringIO("7\nx\n"))
    with pytest.raises(InvalidInputError, match="line 2 of standard input: 'x' is no integer") as caught:
        read_batch("-")
    assert caught.value.reason == Reason.INVALID_ARGUMENT


def test_a_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table([LENGTHS, LENGTHS], names=["tokens", "tokens"]), path)
    with pytest.raises(InvalidInputError, match="several columns 'tokens'"):
        read_batch(str(path), field="tokens")


@pytest.mark.parametrize("damage", [b"{", b", 08,", b"'\n", b"9" * 40])
def test_a_damaged_header_of_an_array_is_no_traceback(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.array([3, 2, 1]))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"(3,", b"(3" + damage)[: len(whole)])
    with pytest.raises(InvalidInputError, match=r"is no \.npy file of numbers"):
        read_batch(str(path))
