# SPDX-License-Identifier: Apache-2.0
"""The tokenizer in an export gives the ids of the run's own: of SentencePiece, in transformers and in llama.cpp."""

import io
import json
import random
import unicodedata
from itertools import product

import pytest

from megatron.convert.sentence_piece import read_model, tokenizer_json
from megatron.errors import CheckpointError, SettingsError
from megatron.inference import generation_config
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import build_tokenizer
from megatron.tools import checkpoint as tool
from megatron.tools import export

sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = pytest.mark.sampled(5)
WORDS = "the cat sat on the mat and the dog ran up a hill , they say : 12 + 7 is 19 ! caf\u00e9 na\u00efve "
WORDS += "\u4e2d\u6587 \uff21\uff22 \ufb01ne"
TEXTS = (
    *("", " ", "   ", " a", "a ", "  two  spaces  ", "\n", "a\nb\n\n c\t", "\r\nwindows\r\n", "the cat sat on the mat"),
    *(
        "\uff21\uff42\uff43\u3000\u2460\u00bd \ufb01 \u2167",
        "caf\u00e9 cafe\u0301",
        "\u4e2d\u6587\u65e5\u672c \ud55c",
        "\u2581x \u2581",
    ),
    *(
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9",
        "a<sep>b",
        "<sep> a <sep>",
        "x<sep><sep>",
        "zero\u200bwidth\ufeff",
        "a\x01\x7fb",
    ),
)
LETTERS = "abcdefg the cat \n\t.,'<|>\u2581012\u00e9\u4e2d\u6587\ud55c\U0001f600\uff21\ufb01\u2160\u00bd"
LETTERS += "\u00a0\u3000\u200b\u0301"
NONE = dict(tokenizer_type=None, vocab_file=None, merge_file=None)


def trained_model(kind: str = "bpe", **settings) -> bytes:
    model = io.BytesIO()
    own = dict(vocab_size=400, hard_vocab_limit=False, character_coverage=1.0, minloglevel=2, num_threads=1)
    words = iter([WORDS, " ".join(reversed(WORDS.split()))] * 20)
    own |= dict(byte_fallback=kind == "bpe", model_type=kind, sentence_iterator=words, model_writer=model)
    sentencepiece.SentencePieceTrainer.train(**own | settings)
    return model.getvalue()


def random_texts(count: int) -> list[str]:
    """Without a combining mark after a character that NFKC replaces: `tokenizers` drops it."""
    draw, texts = random.Random(count), []
    while len(texts) < count:
        text = "".join(draw.choice((*LETTERS, *WORDS.split())) for _ in range(draw.randint(1, 9)))
        if unicodedata.is_normalized("NFKC", text) or "\u0301" not in text:
            texts.append(text)
    return texts


def special_of(proto) -> dict[str, int]:
    return {piece.piece: id for id, piece in enumerate(proto.pieces) if piece.type in (2, 3)}


CASES = list(product(("bpe", "unigram"), ("nmt_nfkc", "nfkc_cf", "identity"), (True, False), (True, False)))


@pytest.mark.parametrize("kind, rule, extra, prefix", CASES)
def test_sentencepiece_as_tokenizer_json(kind, rule, extra, prefix):
    """Its ids are SentencePiece's, with each of its settings, and so is what the ids are decoded to."""
    how = dict(normalization_rule_name=rule, remove_extra_whitespaces=extra, add_dummy_prefix=prefix)
    proto = read_model(model := trained_model(kind, **how, user_defined_symbols=["<sep>", "at"]))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(proto, special_of(proto))))
    for text in (*TEXTS, *random_texts(150)):
        expected = theirs.encode(text)
        assert ours.encode(text).ids == expected, text
        if proto.trainer_spec.unk_id not in expected and "\u2581" not in text:
            assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected), text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shuffled", [False, True])
def test_of_symbols_the_longest_and_of_pieces_the_best_count(shuffled):
    """Whatever the order of pieces in the file."""
    proto = read_model(trained_model(user_defined_symbols=["<sep>", "at", "<sep><sep>", "a"]))
    if shuffled:
        pieces = list(proto.pieces)
        normal = [place for place, piece in enumerate(pieces) if piece.type == 1]
        drawn = random.Random(1).sample(normal, len(normal))
        order = dict(zip(normal, drawn, strict=True))
        del proto.pieces[:]
        proto.pieces.extend(pieces[order.get(place, place)] for place in range(len(pieces)))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(proto, special_of(proto))))
    for text in (*TEXTS, *random_texts(20)):
        assert ours.encode(text).ids == theirs.encode(text), text


@pytest.mark.parametrize(
    "settings, why",
    [
        (dict(model_type="word"), "a model of words"),
        (dict(treat_whitespace_as_suffix=True), "the spaces after the words"),
        (dict(user_defined_symbols=["\uff21\uff21"]), "charsmap changes"),
        (
            dict(model_type="unigram", user_defined_symbols=["\u2581\u2581"], remove_extra_whitespaces=False),
            "several places",
        ),
    ],
)
def test_a_model_that_tokenizers_does_not_express(settings, why):
    proto = read_model(
        trained_model(**dict(kind="bpe") | {"kind" if k == "model_type" else k: v for k, v in settings.items()})
    )
    with pytest.raises(ValueError, match=why):
        tokenizer_json(proto, special_of(proto))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind, end, symbols", [("bpe", "<end>", []), ("unigram", "<EOD>", ["<EOD>"])])
def test_autotokenizer_of_a_sentencepiece_run(new_checkpoint, tmp_path, kind, end, symbols, capsys):
    """SentencePiece's default settings, in transformers: ids, names, and nothing before a prompt or after it."""
    transformers = pytest.importorskip("transformers")
    model = trained_model(kind, pad_id=3, eos_piece="<end>", user_defined_symbols=symbols)
    (tmp_path / "t.model").write_bytes(model)
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "t.model"), rows=400)
    tool.main(["to-hf", str(load), str(tmp_path / "hf"), "--dtype", "fp32"])
    assert "the tokenizer gives the same ids in transformers" in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == own.encode(text), text
    ids = dict(bos_token="<s>", eos_token=end, unk_token="<unk>", pad_token="<pad>")
    assert {name: getattr(theirs, name) for name in ids} == ids
    assert {name: getattr(theirs, f"{name}_id") for name in ids} == {name: own[text] for name, text in ids.items()}
    ends = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert ends["bos_token_id"] == ends["eos_token_id"] == own[end]  # documents follow an end, and no <s>


@pytest.mark.parametrize("rule, dropped", [("nmt_nfkc", False), ("nfkc", True), ("nfkc_cf", True)])
def test_white_space_after_special_tokens(new_checkpoint, tmp_path, rule, dropped, capsys):
    """A charsmap that leaves line ends is exported, and what differs is said: transformers drops them there."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "t.model").write_bytes(trained_model(normalization_rule_name=rule))
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "t.model"), rows=400)
    tool.main(["to-hf", str(load), str(tmp_path / "hf"), "--dtype", "fp32"])
    assert ("white space after special tokens is dropped there" in capsys.readouterr().out) == dropped
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = build_tokenizer(TokenizerSettings(tokenizer_model=str(tmp_path / "t.model")))
    for text, same in (("<s>  a", True), ("the cat</s>sat", True), ("a</s>\nb", not dropped)):
        assert (theirs(text)["input_ids"] == ours.encode_prompt(text)) == same, text


def test_autotokenizer_of_a_run_with_llama2_tokenizer(new_checkpoint, tmp_path, capsys):
    """Prompts begin with <s> there, too."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "t.model").write_bytes(model := trained_model())
    settings = dict(NONE, tokenizer_type="Llama2Tokenizer", tokenizer_model=str(tmp_path / "t.model"))
    load = new_checkpoint(**settings, rows=400)
    tool.main(["to-hf", str(load), str(tmp_path / "hf"), "--dtype", "fp32"])
    assert "the tokenizer gives the same ids in transformers" in capsys.readouterr().out
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = sentencepiece.SentencePieceProcessor(model_proto=model)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == own.encode(text, add_bos=True), text


def test_a_model_of_words_is_exported_without_a_tokenizer_of_transformers(new_checkpoint, tmp_path, capsys):
    (tmp_path / "t.model").write_bytes(trained_model("word"))
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "t.model"), rows=400)
    tool.main(["to-hf", str(load), str(tmp_path / "hf"), "--unchecked"])
    assert "it is a model of words or of characters; tokenizer.model is there alone" in capsys.readouterr().out
    assert not (tmp_path / "hf/tokenizer.json").exists() and not (tmp_path / "hf/tokenizer_config.json").exists()


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def llama_like(folder, vocabulary, bos: bool = True) -> dict[str, int]:
    """A byte-level tokenizer with Llama 3's special tokens and one that is none; name -> id of these."""
    merges = (vocabulary / "merges.txt").read_text(encoding="utf-8").splitlines()[1:9]
    vocab = dict(list(json.loads((vocabulary / "vocab.json").read_text(encoding="utf-8")).items())[:265])
    merges = [merge for merge in merges if merge.replace(" ", "") in vocab]
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<pad>"]
    library.add_special_tokens(names)
    library.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    if bos:
        first = names[0]
        around = dict(single=f"{first} $A", special_tokens=[(first, library.token_to_id(first))])
        library.post_processor = tokenizers.processors.TemplateProcessing(**around)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=names[1], pad_token="<pad>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | (dict(bos_token=names[0]) if bos else {})))
    return {name: library.token_to_id(name) for name in (*names, "<think>")}


def fields_of(path) -> dict:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(path).fields
    return {name.removeprefix("tokenizer."): field.contents() for name, field in fields.items() if "tokenizer" in name}


@pytest.mark.parametrize("bos", [True, False])
def test_gguf_says_what_the_tokenizer_says(new_checkpoint, vocabulary, tmp_path, bos):
    """Before the file appears, llama.cpp itself gives the same ids for texts and for prompts with names of tokens."""
    pytest.importorskip("xllamacpp")
    ids = llama_like(tmp_path / "words", vocabulary, bos)
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "words"))
    (load / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    )
    (load / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="<|eot_id|>")))
    export.main(["--load", str(load), "--output", str(tmp_path / "out"), "--format", "gguf", "--dtype", "fp32"])
    found = fields_of(tmp_path / "out/model.gguf")
    assert found["ggml.bos_token_id"] == ids["<|begin_of_text|>" if bos else "<|end_of_text|>"]
    assert found["ggml.add_bos_token"] is bos and found["ggml.add_eos_token"] is False
    assert (found["ggml.eos_token_id"], found["ggml.eot_token_id"]) == (ids["<|end_of_text|>"], ids["<|eot_id|>"])
    assert found["ggml.padding_token_id"] == ids["<pad>"] and "{{ eos_token }}" in found["chat_template"]
    types = found["ggml.token_type"]
    assert [types[ids[name]] for name in ids] == [3, 3, 3, 3, 4]  # control tokens, and a user-defined one
    assert types[0] == 1 and found["ggml.tokens"][ids["<think>"]] == "<think>"
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert generation["eos_token_id"] == [ids["<|eot_id|>"], ids["<|end_of_text|>"]]
    assert generation["bos_token_id"] == ids["<|begin_of_text|>" if bos else "<|end_of_text|>"]


def test_gguf_of_sentencepiece(new_checkpoint, tmp_path, capsys):
    """Scores, types and ids of a model that leaves texts as they are; one that normalizes them is refused by its ids."""
    pytest.importorskip("xllamacpp")
    plain = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    for name, how in (("plain", plain), ("normal", {})):
        (tmp_path / f"{name}.model").write_bytes(trained_model(user_defined_symbols=["<eod>"], **how))
    words = ["--format", "gguf", "--dtype", "fp32"]
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "plain.model"), rows=400)
    export.main(["--load", str(load), "--output", str(tmp_path / "out"), *words])
    [note] = [line for line in capsys.readouterr().out.splitlines() if "other ids" in line]
    assert note.endswith("for some texts: it puts a space after user-defined symbols (add_dummy_prefix)")
    found, proto = fields_of(tmp_path / "out/model.gguf"), read_model((tmp_path / "plain.model").read_bytes())
    scores = [piece.score for piece in proto.pieces]
    assert found["ggml.scores"][: len(scores)] == pytest.approx(scores) and len(found["ggml.tokens"]) == 400
    assert found["ggml.token_type"][:5] == [2, 3, 3, 3, 6] and found["ggml.tokens"][3] == "<eod>"
    special = [found[f"ggml.{name}"] for name in ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token")]
    assert special == [1, 3, 0, False]
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "normal.model"), rows=400)
    with pytest.raises(CheckpointError, match=r"(?s)other ids for the text.*normalizes no texts \(nmt_nfkc\)"):
        export.main(["--load", str(load), "--output", str(tmp_path / "no"), *words])
    (tmp_path / "plain.model").write_bytes(trained_model(byte_fallback=False, **plain))
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "plain.model"), rows=400)
    with pytest.raises(SettingsError, match="ends at a character that is no piece, and this model has no bytes"):
        export.main(["--load", str(load), "--output", str(tmp_path / "no"), *words])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("rule", ["nmt_nfkc", "identity"])
def test_gguf_of_unigram(new_checkpoint, tmp_path, rule, capsys):
    """llama.cpp's Unigram has the charsmap, and removes spaces. It compares the ids before the file appears."""
    pytest.importorskip("xllamacpp")
    how = dict(normalization_rule_name=rule, remove_extra_whitespaces=rule == "nmt_nfkc")
    (tmp_path / "t.model").write_bytes(trained_model("unigram", **how))
    load = new_checkpoint(**NONE, tokenizer_model=str(tmp_path / "t.model"), rows=400)
    export.main(["--load", str(load), "--output", str(tmp_path / "out"), "--format", "gguf", "--dtype", "fp32"])
    assert "other ids" not in capsys.readouterr().out
    assert fields_of(tmp_path / "out/model.gguf")["ggml.model"] == "t5"


def test_an_export_recommends_what_it_is_told(new_checkpoint, tmp_path):
    """PaddleFleetX's programs have the section Generation in them: what generates from the folder, here and in
    transformers, takes it.
    """
    transformers = pytest.importorskip("transformers")
    load = new_checkpoint()
    (load / "generation_config.json").write_text(json.dumps(dict(num_beams=4, length_penalty=0.5, min_p=0.1)))
    section = "{decode_strategy: sampling, top_p: 0.75, max_dec_len: 9, min_dec_len: 2, num_return_sequences: 3}"
    (tmp_path / "run.yaml").write_text(f"Generation: {section}\n")
    words = ["--load", str(load), "--no-check", "--output"]
    export.main([*words, str(tmp_path / "drawn"), "-c", str(tmp_path / "run.yaml")])
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "drawn")
    assert (theirs.do_sample, theirs.top_p, theirs.top_k, theirs.num_beams or 1) == (True, 0.75, 0, 1)
    assert (theirs.max_new_tokens, theirs.min_new_tokens, theirs.num_return_sequences) == (9, 2, 3)
    ours = generation_config.read(tmp_path / "drawn")
    wanted = dict(top_p=0.75, top_k=0, min_p=0.1, tokens_to_generate=9, min_tokens_to_generate=2, num_samples=3)
    assert ours.settings == wanted and not ours.unknown and ours.ends
    export.main([*words, str(tmp_path / "beams"), "--num-beams", "2", "--max-new-tokens", "5"])
    wanted = dict(num_beams=2, length_penalty=0.5, tokens_to_generate=5)
    assert generation_config.read(tmp_path / "beams").settings == wanted
    with pytest.raises(SettingsError, match="--frequency-penalty: generation_config.json.* has no such key"):
        export.main([*words, str(tmp_path / "no"), "--frequency-penalty", "0.5"])
    assert not (tmp_path / "no").exists()


# ---- all formats -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
def test_programs_and_weights_have_the_same_files(new_checkpoint, vocabulary, tmp_path):
    """And this suite opens the same tokenizer in each."""
    load = new_checkpoint()
    (load / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}")
    (load / "generation_config.json").write_text(json.dumps(dict(temperature=0.5)))
    for form in ("hf", "torch-export"):
        export.main(["--load", str(load), "--output", str(tmp_path / form), "--format", form, "--no-check"])
    names = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"]
    for name in (*names, "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "torch-export" / name).read_bytes(), name
    own = build_tokenizer(
        TokenizerSettings("GPT2BPETokenizer", str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    )
    record = json.loads((tmp_path / "torch-export" / "export.json").read_text())
    assert record["vocabulary"] == own.fingerprint and record["tokenizer"]["eod"] == record["end"] == own.eod
    assert json.loads((tmp_path / "hf/generation_config.json").read_text()) == dict(
        temperature=0.5, bos_token_id=own.eod, eos_token_id=own.eod
    )
