# SPDX-License-Identifier: Apache-2.0
"""Where documents are in the order of training, against a walk over all samples."""

import numpy as np
import pytest

from megatron.data.find_documents import document_of, files_of, find_places, search, sequences_of_document
from megatron.data.formats import open_tokens
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import write_index
from megatron.errors import DataError
from megatron.settings.schema import Data

SHAPES = {  # tokens of each document's sequences
    "many": [[n % 7] for n in range(60)],
    "long": [[50], [0], [3], [120], [1], [1], [16]],
    "sentences": [[4, 5], [], [0, 3], [30, 30, 30], [2], [1, 1], [9]],
}


def token_files(folder, name) -> str:
    shapes = SHAPES[name]
    lengths = np.array([length for shape in shapes for length in shape], np.int32)
    np.arange(lengths.sum(), dtype=np.uint16).tofile(folder / f"{name}.bin")
    write_index(folder / f"{name}.idx", np.uint16, lengths, np.cumsum([0, *map(len, shapes)]))
    return str(folder / name)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    return {name: token_files(folder, name) for name in SHAPES}


CASES = {
    "one epoch": (["many"], {}, 5),
    "several epochs, the last one apart": (["many"], {}, 100),
    "several epochs together": (["sentences"], {}, 37),
    "long documents": (["long"], {}, 30),
    "blend": (["0.3", "many", "0.7", "long"], {}, 60),
    "the same file twice": (["0.5", "many", "0.5", "many"], {}, 60),
    "without weights": (["many", "sentences"], {}, 20),
    "documents": (["many"], dict(dataset_type="webtext"), 150),
    "documents of sentences": (["0.4", "sentences", "0.6", "long"], dict(dataset_type="webtext"), 40),
}


def walk(dataset) -> dict[tuple[str, int], set[int]]:
    """(prefix, sequence) -> samples that hold a token of it, told by the tokens themselves."""
    found = {}
    starts = {prefix: np.cumsum([0, *files.sequence_lengths]) for prefix, files in files_of(dataset).items()}
    for place in range(len(dataset)):
        prefix, given = dataset.origin(place).prefix, dataset[place]
        ids, mask = given if isinstance(given, tuple) else (given, np.ones(len(given)))
        for id in ids[mask > 0].tolist():
            found.setdefault((prefix, int(np.searchsorted(starts[prefix], id, "right")) - 1), set()).add(place)
    return found


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_places_are_those_of_a_walk(prefixes, tmp_path, case, split):
    words, more, size = CASES[case]
    data = Data(
        data_path=[prefixes.get(word, word) for word in words], split="80,20,0", data_cache_path=str(tmp_path), **more
    )
    sizes = (size, 0, 0) if split == 0 else (0, size, 0)
    dataset = build_datasets(data, 8, sizes, seed=3, eod=999)[split]
    expected = walk(dataset)
    assert len(expected) > (3 if split == 0 else 0)
    for prefix, files in files_of(dataset).items():
        for sequence in range(len(files)):
            found = find_places(dataset, prefix, [sequence]).tolist()
            assert found == sorted(expected.get((prefix, sequence), ())), (prefix, sequence)
        for document in range(files.num_documents):
            sequences = sequences_of_document(files, document)
            assert all(document_of(files, sequence) == document for sequence in sequences)
            together = set().union(*(expected.get((prefix, sequence), set()) for sequence in sequences))
            assert find_places(dataset, prefix, sequences).tolist() == sorted(together)


def test_what_there_is_not(prefixes, tmp_path):
    data = Data(data_path=[prefixes["many"]], split="1,0,0", data_cache_path=str(tmp_path))
    dataset = build_datasets(data, 8, (5, 0, 0), seed=3)[0]
    assert find_places(dataset, "another", [1]).tolist() == []
    with pytest.raises(DataError, match="documents 0 to 59, and no 60"):
        sequences_of_document(files_of(dataset)[prefixes["many"]], 60)
    with pytest.raises(DataError, match="list does not say where its samples come from"):
        find_places([], "many", [1])


def test_a_text_is_not_found_across_the_end_of_a_document(tmp_path):
    documents = [list(range(100, 130)), list(range(130, 160)), list(range(100, 145))]
    np.array([id for ids in documents for id in ids], np.uint16).tofile(tmp_path / "t.bin")
    write_index(tmp_path / "t.idx", np.uint16, np.array([30, 30, 45], np.int32), np.arange(4))
    tokens = open_tokens(str(tmp_path / "t"))
    found = {holder.document: holder.share for holder in search(tokens, [range(116, 144)])}
    ids = list(range(118, 142))  # without the tokens at its ends
    grams = {tuple(ids[at : at + 12]) for at in range(len(ids) - 11)}
    for number, own in enumerate(documents):
        held = {tuple(own[at : at + 12]) for at in range(len(own) - 11)}
        assert found.get(number, 0) == len(grams & held) / len(grams)
    assert found[2] == 1 and 0 < found[0] < 0.5
