# SPDX-License-Identifier: Apache-2.0
"""--split-sentences: nltk's own sentences where nltk and its data are there, sentencex otherwise, said in the log."""

import builtins
import json
import sys
import types

import numpy as np
import pytest

import preprocess_data
from megatron.data.sentences import make_splitter
from megatron.errors import DataError, MissingPackage, UsageError

TEXT = (
    "Dr. Smith met Mr. Jones at 5 p.m. on Jan. 3. He paid $3.50 (approx.) for it!  Was that wise?\n\nNobody knows. "
    'She said: "It is so." Then she left... The U.S. firm, e.g. Acme Inc., did not reply. No. 7 won.\nEnd'
)


@pytest.fixture
def nltk_data(tmp_path, monkeypatch):
    """nltk with data for English that its own trainer makes, in the form in which nltk distributes them."""
    nltk = pytest.importorskip("nltk")
    from nltk.tokenize import punkt

    trainer = punkt.PunktTrainer(verbose=False)
    trainer.train(" ".join(f"Dr. {name} met Mr. {name} at noon. They spoke." for name in "ABCDEFGH"), finalize=True)
    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])  # nltk writes nowhere else
    punkt.save_punkt_params(trainer.get_params(), str(folder))
    return punkt


def without_nltk(monkeypatch):
    real = builtins.__import__

    def refuse(name, *more):
        if name.split(".")[0] == "nltk":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse)


def pretend_nltk(monkeypatch, tokenizer) -> None:
    """An nltk whose Punkt is this function of the language."""
    punkt = types.SimpleNamespace(PunktTokenizer=tokenizer)
    for name, module in (("nltk", types.ModuleType("nltk")), ("nltk.tokenize", types.ModuleType("nltk.tokenize"))):
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["nltk.tokenize"].punkt = punkt


@pytest.mark.sampled(5)
@pytest.mark.parametrize("keep_newlines", [False, True])
def test_sentences_are_nltks_own(nltk_data, keep_newlines):
    """Against nltk used as Megatron-LM's preprocess_data.py uses it; `auto` takes it where its data are."""
    theirs = nltk_data.PunktTokenizer("english")
    if keep_newlines:

        class Vars(nltk_data.PunktLanguageVars):  # Megatron-LM's: white space goes with the sentence before it
            _period_context_fmt = r"%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"

        theirs = nltk_data.PunktSentenceTokenizer(train_text=theirs._params, lang_vars=Vars())
    told = []
    mine = make_splitter("auto", "english", keep_newlines, told.append)
    text = TEXT * 30
    assert mine(text) == theirs.tokenize(text)
    assert told == ["> splitting english sentences by nltk's Punkt, as Megatron-LM does"]


def test_token_files_are_those_of_nltks_sentences(nltk_data, tmp_path, capsys):
    """The whole command, against the format written out by numpy from nltk's sentences."""
    texts = ["1 2. Three 3. 4", "", "Dr. 5 came. 6 7!"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    sentences = [nltk_data.PunktTokenizer("english").tokenize(text) for text in texts]
    vocabulary = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model".split()
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({word for document in sentences for one in document for word in one.replace(".", " . ").split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    given = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--split-sentences"]
    preprocess_data.main([*given, *vocabulary, str(tmp_path / "tokenizer.json")])
    lengths = [len(tokenizer.encode(one).ids) for document in sentences for one in document]
    ids = [i for document in sentences for one in document for i in tokenizer.encode(one).ids]
    assert np.fromfile(tmp_path / "out_text_sentence.bin", np.uint16).tolist() == ids
    index = (tmp_path / "out_text_sentence.idx").read_bytes()
    assert np.frombuffer(index, np.int32, len(lengths), 34).tolist() == lengths
    assert np.frombuffer(index[-32:], np.int64).tolist() == np.cumsum([0, *map(len, sentences)]).tolist()
    assert "by nltk's Punkt, as Megatron-LM does" in capsys.readouterr().out


def test_auto_without_nltk_is_sentencex_and_says_so(monkeypatch):
    sentencex = pytest.importorskip("sentencex")
    without_nltk(monkeypatch)
    told = []
    split = make_splitter("auto", "english", True, told.append)
    assert split(TEXT) == sentencex.segment("en", TEXT)
    assert "by sentencex (the package nltk is not on this machine: Megatron-LM's sentences" in told[0]


def test_auto_without_the_data_of_the_language(monkeypatch):
    def lost(language):
        raise LookupError(language)

    pretend_nltk(monkeypatch, lost)
    told = []
    make_splitter("auto", "german", False, told.append)
    assert "by sentencex (nltk's punkt data for german is not on this machine" in told[0]
    with pytest.raises(DataError, match="punkt data for german is not on this machine"):
        make_splitter("nltk", "german", False)


def test_what_is_asked_for_is_taken(monkeypatch):
    told = []
    pretend_nltk(monkeypatch, lambda language: types.SimpleNamespace(tokenize=lambda text: [language, text]))
    assert make_splitter("auto", "danish", False)("a. b") == ["danish", "a. b"]
    assert make_splitter("nltk", "danish", False)("a. b") == ["danish", "a. b"]
    assert make_splitter("sentencex", "english", False, told.append)("He ran. She won.") == ["He ran.", "She won."]
    assert told == ["> splitting english sentences by sentencex"]


def test_nltk_that_is_not_there_or_too_old(monkeypatch):
    monkeypatch.setitem(sys.modules, "nltk", types.ModuleType("nltk"))
    monkeypatch.setitem(sys.modules, "nltk.tokenize", types.ModuleType("nltk.tokenize"))
    sys.modules["nltk.tokenize"].punkt = types.SimpleNamespace()
    with pytest.raises(MissingPackage, match="older than 3.8.2") as error:
        make_splitter("nltk", "english", False)
    assert error.value.code == 3
    without_nltk(monkeypatch)
    with pytest.raises(MissingPackage, match="nltk is not on this machine"):
        make_splitter("nltk", "english", False)


def test_no_other_splitter(tmp_path):
    with pytest.raises(UsageError, match="'spacy' is none of auto, nltk, sentencex"):
        preprocess_data.main(["--input", "x", "--output-prefix", str(tmp_path / "o"), "--sentence-splitter", "spacy"])
