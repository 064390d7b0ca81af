# SPDX-License-Identifier: Apache-2.0
"""From text to samples of BERT and T5: sentences are split, and what is masked stands in the words."""

import json
import re

import pytest

import preprocess_data
from megatron.errors import DataError, SettingsError
from megatron.tools.dump_samples import main

TEXTS = [
    "The old man walks home. A young dog follows him there! The night is cold; nobody talks.",
    "It rains. The boy runs to the house.",
    "",
    "One sentence stands alone here.",
]
WORDS = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(TEXTS).lower())))


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    (folder / "text.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS))
    vocabulary = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    splitting = ["--split-sentences", "--sentence-splitter", "sentencex", "--workers", "1"]
    files = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "text")]
    preprocess_data.main([*files, *vocabulary, *splitting])
    data = ["--data-path", str(folder / "text_text_sentence"), "--split", "1,0,0", "--short-seq-prob", "0"]
    return [*vocabulary, *data, "--seq-length", "48", "--train-samples", "6", "--text"]


def dump(capsys, *argv) -> list[dict]:
    capsys.readouterr()
    main([*argv])
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def plain(text: str) -> str:
    return re.sub(r"\s", "", text.lower())


def test_bert_shows_what_was_and_what_is_read(flags, capsys):
    lines, told = dump(capsys, *flags, "--model-type", "BERT", "--bert-no-binary-head")
    assert "1 of 4 documents are dropped: 1 without a sentence" in told
    found = set()
    for line in lines:
        assert sum(line["loss_mask"]) == line["words"].count(" -> ") > 0
        back = re.sub(r"\[(\S+) -> \S+\]", r"\1", line["words"])
        found.add(plain(back.replace("[CLS]", "").replace("[SEP]", "")))
    assert found == {plain(text) for text in TEXTS if text}
    pairs, told = dump(capsys, *flags, "--model-type", "BERT")
    assert "1 with fewer than 2 sentences" in told and all(line["words"].count("[SEP]") == 2 for line in pairs)


def test_t5_shows_its_sentinels(flags, capsys):
    lines, _ = dump(capsys, *flags, "--model-type", "T5", "--vocab-extra-ids", "20")
    found = set()
    for line in lines:
        assert line["text_dec_words"].replace("[BOS] ", "") + " [EOS]" == line["labels_words"]
        spans = re.findall(r"(<extra_id_\d+>) ([^<]+?) (?=<|\[EOS)", line["labels_words"])
        back = line["text_enc_words"]
        for sentinel, words in spans:
            assert back.count(sentinel) == 1
            back = back.replace(sentinel, words)
        found.add(plain(back))
    assert found == {plain(text) for text in TEXTS if text}


def test_mixtures_show_their_tasks(flags, capsys, tmp_path):
    (tmp_path / "mood.tsv").write_text("text\tlabel\nThe dog talks.\tgood\nIt rains.\tbad\n")
    mixture = ["--task-mixture", "masked=2", f"mood=1:{tmp_path}/mood.tsv"]
    lines, told = dump(capsys, *flags, "--model-type", "BERT", *mixture)
    assert "mixture of tasks: of 3 samples masked 2, mood 1" in told and "2 labelled texts, 2 classes" in told
    assert [line["task"] for line in lines] == [0, 1, 0] * 2
    texts = {(line["words"], line["class_label"]) for line in lines if line["task"]}
    assert texts == {("[CLS] the dog talks. [SEP]", 1), ("[CLS] it rains. [SEP]", 0)}


def test_a_mixture_has_one_vocabulary(flags, tmp_path):
    (tmp_path / "other.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n")
    (tmp_path / "text.jsonl").write_text('{"text": "the. the the."}\n')
    vocabulary = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(tmp_path / "other.txt")]
    files = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text"), "--workers", "1"]
    preprocess_data.main([*files, *vocabulary, "--split-sentences", "--sentence-splitter", "sentencex"])
    with pytest.raises(DataError, match="made with another vocabulary"):
        main([*flags, "--model-type", "BERT", "--task-mixture", "masked=1", f"b=1:{tmp_path}/text_text_sentence"])


def test_masked_samples_need_a_tokenizer(flags, tmp_path):
    data = [word for word in flags[4:] if word != "--text"]
    with pytest.raises(SettingsError, match="--model-type T5 needs a tokenizer"):
        main([*data, "--model-type", "T5"])
    with pytest.raises(SettingsError, match="no sentinels"):
        main([*flags, "--model-type", "T5"])
