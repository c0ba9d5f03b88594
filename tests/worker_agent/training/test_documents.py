"""The corpus: real documents, whole, the same every time."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from worker_agent.training.documents import CorpusConfig, Documents, prepare_documents

SMALL = CorpusConfig(vocabulary=512, shortest=16, longest=2_000, documents=40)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with copies of some real modules, in sub-folders."""
    folder = tmp_path_factory.mktemp("source")
    for file in sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py")):
        Path(folder, "json").mkdir(exist_ok=True)
        Path(folder, "json", file.name).write_bytes(file.read_bytes())
    for number in range(30):
        Path(folder, f"short_{number}.py").write_text(
            f"value_{number} = [{number}, 'a piece of text']\n" * (number + 3)
        )
    return folder


def test_the_standard_library_gives_lengths_over_orders_of_magnitude(tmp_path: Path):
    documents = prepare_documents(tmp_path / "documents.npz")
    config = CorpusConfig()
    lengths = documents.lengths
    assert lengths.min() >= config.shortest
    assert lengths.max() <= config.longest
    assert lengths.max() > 100 * lengths.min()
    assert np.median(lengths) < lengths.mean() / 2, "a mass of short documents and a few long ones"
    assert int(documents.tokens.max()) < documents.vocabulary
    assert len(np.unique(documents.tokens)) > documents.vocabulary // 2, "the vocabulary is used"


def test_the_same_files_give_the_same_tokens(source: Path, tmp_path: Path):
    first = prepare_documents(tmp_path / "first.npz", SMALL, source)
    second = prepare_documents(tmp_path / "second.npz", SMALL, source)
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.offsets, second.offsets)


def test_prepared_documents_are_reused_until_a_file_or_a_setting_changes(source: Path, tmp_path: Path):
    path = tmp_path / "documents.npz"
    first = prepare_documents(path, SMALL, source)
    written = path.stat().st_mtime_ns
    assert prepare_documents(path, SMALL, source).fingerprint == first.fingerprint
    assert path.stat().st_mtime_ns == written
    other = CorpusConfig(vocabulary=400, shortest=16, longest=2_000, documents=40)
    assert prepare_documents(path, other, source).vocabulary == 400
    Path(source, "added.py").write_text("one_more = 'document'\n" * 10)
    assert prepare_documents(path, SMALL, source).fingerprint != first.fingerprint


def test_a_document_outside_the_range_is_left_out_and_never_cut(source: Path, tmp_path: Path):
    everything = prepare_documents(tmp_path / "all.npz", SMALL, source)
    limit = int(np.sort(everything.lengths)[-3])
    fewer = prepare_documents(
        tmp_path / "fewer.npz", CorpusConfig(vocabulary=512, shortest=16, longest=limit, documents=40), source
    )
    # The vocabulary differs a little, since it is trained on the files that are taken; what is kept is whole.
    assert fewer.lengths.max() <= limit
    assert all(fewer[i][0] == fewer[0][0] for i in range(len(fewer))), "every document starts with the separator"
    assert all((fewer[i][1:] != fewer[0][0]).all() for i in range(len(fewer)))


def test_documents_come_back_from_disk_as_they_were(source: Path, tmp_path: Path):
    path = tmp_path / "documents.npz"
    made = prepare_documents(path, SMALL, source)
    loaded = Documents.load(path)
    assert len(loaded) == len(made)
    assert all(np.array_equal(loaded[i], made[i]) for i in range(len(made)))
    assert loaded[0].dtype == np.int64


def test_a_folder_without_source_files_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        prepare_documents(tmp_path / "documents.npz", SMALL, tmp_path)
