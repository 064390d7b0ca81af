# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers in the layouts of published families: the files of their folders, with small vocabularies.

files = files_of("llama2-slow")  # name -> content
write(files, folder)
"""

import base64
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.tokenizer.matrix.families import FAMILIES, Added, Family, byte_level, sequence
from tests.tokenizer.matrix.templates import TEMPLATES
from tests.tokenizer.matrix.texts import TRAINED_ON

Files = dict[str, Any]  # name -> text, bytes, or what JSON has

# ---- variants --------------------------------------------------------------------------------------------------------

Change = Callable[[Files], None]
JSON, CONFIG = "tokenizer.json", "tokenizer_config.json"


def configured(**changes) -> Change:
    """Other values in tokenizer_config.json."""
    return lambda files: files[CONFIG].update(changes)


def slow(*changes: Change) -> Change:
    """Without tokenizer.json."""

    def change(files: Files) -> None:
        del files[JSON]
        for one in changes:
            one(files)

    return change


def fast_alone(files: Files) -> None:
    for name in set(files) - {JSON}:
        del files[name]


def without_slow(*changes: Change) -> Change:
    """Without the files that tokenizer.json repeats."""

    def change(files: Files) -> None:
        for name in ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "vocab.txt"):
            files.pop(name, None)
        for one in changes:
            one(files)

    return change


def of_model(*changes: Change) -> Change:
    """With the config.json of a model."""

    def change(files: Files) -> None:
        files["config.json"] = dict(model_type=files["model_type"])
        for one in changes:
            one(files)

    return change


def more_tokens(files: Files) -> None:
    """Tokens that tokenizer_config.json alone adds, with flags of every kind; the last one is special."""
    first = size_of(files)
    more = (
        Added("<left>", False, lstrip=True),
        Added("<right>", False, rstrip=True),
        Added("word", False, single_word=True),
        Added("<Normal>", False, normalized=True),
        Added("<|extra|>", True),
        Added("<|wide|>", True, lstrip=True, rstrip=True),
    )
    listed = {str(token["id"]): without_id(token) for token in files[JSON]["added_tokens"]}
    listed |= {str(first + number): token._asdict() for number, token in enumerate(more)}
    files[CONFIG]["added_tokens_decoder"] = listed


def tokens_of_old_files(files: Files) -> None:
    """Tokens of added_tokens.json, one of which special_tokens_map.json names: files of early versions of transformers."""
    first = size_of(files)
    files["added_tokens.json"] = {"<late>": first, "<|later|>": first + 1}
    files[CONFIG].pop("additional_special_tokens", None)
    files["special_tokens_map.json"] = dict(additional_special_tokens=["<|later|>"], pad_token="<|later|>")


def late_tokens(files: Files) -> None:
    """Tokens of added_tokens.json alone."""
    first = size_of(files)
    files["added_tokens.json"] = {"<late>": first, "<later>": first + 1}


def without_config(files: Files) -> None:
    """transformers chooses the class by config.json."""
    del files[CONFIG]


def merges_of_names(files: Files) -> None:
    """Merges, or words, that make names of special tokens of pieces of text: a vocabulary that was trained on markup."""
    model, names = files[JSON]["model"], [one["content"] for one in files[JSON]["added_tokens"] if one["special"]]
    names = [name for name in names if name.isascii() and name in model["vocab"]][-3:]
    if model["type"] == "BPE":
        made = []
        for name in names:
            for size in range(2, len(name) + 1):
                for part in (name[:size], name[size - 1]):
                    model["vocab"].setdefault(part, max(model["vocab"].values()) + 1)
                made.append([name[: size - 1], name[size - 1]])
        model["merges"] = made + model["merges"]
        files[JSON]["pre_tokenizer"] = None
    else:  # words are names if no step cuts them
        files[JSON]["pre_tokenizer"] = dict(type="WhitespaceSplit")
        files[JSON]["normalizer"] = None
    files[CONFIG]["tokenizer_class"] = "PreTrainedTokenizerFast"


def without_names(files: Files) -> None:
    """tokenizer_config.json does not name special tokens: classes have names of their own."""
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        files[CONFIG].pop(name, None)


def class_alone(files: Files) -> None:
    """tokenizer_config.json with the names of the class and of special tokens alone."""
    kept = {name for name in files[CONFIG] if name.endswith("_token")} | {"tokenizer_class", "chat_template"}
    files[CONFIG] = {name: files[CONFIG][name] for name in files[CONFIG] if name in kept - {"add_bos_token"}}


def listed_tokens(files: Files) -> None:
    """tokenizer_config.json with all added tokens, as save_pretrained writes it."""
    files[CONFIG]["added_tokens_decoder"] = {str(one["id"]): without_id(one) for one in files[JSON]["added_tokens"]}


def size_of(files: Files) -> int:
    """Ids of the vocabulary."""
    vocab = files[JSON]["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max([*ids, *(token["id"] for token in files[JSON]["added_tokens"])]) + 1


def without_id(token: dict) -> dict:
    return {name: value for name, value in token.items() if name != "id"}


CHANGES: dict[str, Any] = dict(
    usual=without_slow(),
    bos=without_slow(configured(add_bos_token=True)),
    no_bos=without_slow(configured(add_bos_token=False)),
    eos=without_slow(configured(add_eos_token=True)),
    legacy=without_slow(configured(legacy=True)),
    new=without_slow(configured(legacy=False)),
    space=without_slow(configured(add_prefix_space=True)),
    no_space=without_slow(configured(add_prefix_space=False)),
    cased=without_slow(configured(do_lower_case=False)),
    as_llama=without_slow(configured(tokenizer_class="LlamaTokenizer")),
    parsed=without_slow(configured(split_special_tokens=True)),
    model=of_model(without_slow()),
    alone=fast_alone,
    listed=listed_tokens,
    added=more_tokens,
    old=tokens_of_old_files,
    late=without_slow(late_tokens),
    merged=without_slow(merges_of_names),
    unnamed=without_slow(without_names),
    classed=without_slow(class_alone),
    slow=slow(),
    slow_bos=slow(configured(add_bos_token=True)),
    slow_no_bos=slow(configured(add_bos_token=False)),
    slow_eos=slow(configured(add_eos_token=True)),
    slow_legacy=slow(configured(legacy=True)),
    slow_new=slow(configured(legacy=False)),
    slow_space=slow(configured(add_prefix_space=True)),
    slow_no_space=slow(configured(add_prefix_space=False)),
    slow_cased=slow(configured(do_lower_case=False)),
    slow_model=(of_model(), slow()),
    slow_listed=(listed_tokens, slow()),
    slow_added=(more_tokens, slow()),
    slow_old=(tokens_of_old_files, slow()),
    slow_unnamed=slow(without_names),
    slow_alone=(of_model(), late_tokens, slow(without_config)),
)
# transformers 5.23 does not read the slow files of a model of type olmo2, phi3 (Phi-4) or mistral (Tekken): it looks for
# tokenizer.json or tokenizer.model alone. Of Gemma 2's tokenizer.model it makes what that of Gemma 3 is.
_TABLE = """
llama2: usual bos no_bos eos legacy no_space parsed model alone listed added old merged unnamed classed slow slow_no_bos
    slow_eos slow_legacy slow_no_space slow_model slow_listed slow_added slow_old slow_unnamed slow_alone
mistral1: usual new classed model old slow slow_new slow_model slow_added slow_alone
mistral3: usual legacy model alone added slow slow_legacy slow_model slow_listed
phi3: usual bos model added unnamed slow slow_model slow_listed slow_added slow_alone
gemma2: usual bos no_bos eos model alone listed added old merged
gemma3: usual model added slow slow_model slow_listed slow_alone
llama3: usual bos no_bos eos model alone listed added late old as_llama unnamed parsed
qwen2: usual bos eos space model alone added late old unnamed slow slow_bos slow_model slow_listed slow_added
    slow_old slow_alone
qwen3: usual model added slow slow_listed
tekken: usual classed model alone old merged
phi4: usual bos classed model alone slow slow_listed
deepseek3: usual bos no_bos model alone as_llama
gpt2: usual bos space model alone added slow slow_bos slow_space slow_model slow_listed slow_added
    slow_old slow_unnamed slow_alone
gpt_oss: usual model alone added old
olmo2: usual model alone added slow_listed
smollm: usual bos model slow slow_bos
starcoder: usual model alone slow slow_space
falcon: usual no_bos model alone added old
t5: usual classed model alone added slow slow_added slow_alone
bert: usual cased model alone added merged slow slow_cased slow_added slow_alone
"""


def variants() -> Iterator[tuple[str, str, tuple[Change, ...]]]:
    """(name, family, changes) of each variant."""
    for row in _TABLE.replace("\n    ", " ").strip().split("\n"):
        family, _, names = row.partition(":")
        for name in names.split():
            changes = CHANGES[name]
            whole = family if name == "usual" else f"{family}-{name}"
            yield whole, family, changes if isinstance(changes, tuple) else (changes,)


VARIANTS = {name: (family, changes) for name, family, changes in variants()}

# ---- files -----------------------------------------------------------------------------------------------------------


def files_of(variant: str) -> Files:
    """Name -> content of the files of a folder."""
    family, changes = VARIANTS[variant]
    files = usual_files(family)
    for change in changes:
        change(files)
    files.pop("model_type", None)
    return files


def write(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (folder / name).write_text(text, encoding="utf-8", newline="")


def usual_files(name: str) -> Files:
    """All files of a family, and model_type."""
    family = FAMILIES[name]
    model, slow_files = VOCABULARIES[family.kind](name)
    vocab = model["vocab"]
    ids = dict(vocab) if isinstance(vocab, dict) else {piece: id for id, (piece, _) in enumerate(vocab)}
    for token in family.beyond:
        ids.setdefault(token.content, max(ids.values()) + 1)
    added = [dict(id=ids[token.content], **token._asdict()) for token in (*family.inside, *family.beyond)]
    normalizer = family.normalizer
    if normalizer == "precompiled":
        normalizer = dict(type="Precompiled", precompiled_charsmap=base64.b64encode(charsmap(slow_files)).decode())
    whole = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=sorted(added, key=lambda one: one["id"]),
        normalizer=normalizer,
        pre_tokenizer=family.pre_tokenizer,
        post_processor=post_processor(family, ids),
        decoder=family.decoder,
        model=model,
    )
    files = {
        JSON: whole,
        CONFIG: json.loads(json.dumps(dict(family.config))),
        **slow_files,
        "model_type": family.model_type,
    }
    if family.template:
        files[CONFIG]["chat_template"] = TEMPLATES[family.template]
    ends = [ids[name] for name in family.ends.split()]
    if ends:
        files["generation_config.json"] = dict(
            eos_token_id=ends if len(ends) > 1 else ends[0], do_sample=True, temperature=0.6
        )
    return json.loads(json.dumps({n: one for n, one in files.items() if not isinstance(one, bytes)})) | {
        n: one for n, one in files.items() if isinstance(one, bytes)
    }


def post_processor(family: Family, ids: Mapping[str, int]):
    """The step that puts tokens around a prompt."""
    of_bytes = byte_level(True, trim_offsets=False) if family.kind == "bytes" else None
    before, after = family.before.split(), family.after.split()
    names = before + after
    if not names and not (family.kind == "pieces"):
        return of_bytes
    put = lambda name, kind: dict(SpecialToken=dict(id=name, type_id=kind))
    around = lambda of, kind: [
        *(put(name, kind) for name in before),
        dict(Sequence=dict(id=of, type_id=kind)),
        *(put(name, kind) for name in after),
    ]
    template = dict(
        type="TemplateProcessing",
        single=around("A", 0),
        pair=around("A", 0) + around("B", 1),
        special_tokens={name: dict(id=name, ids=[ids[name]], tokens=[name]) for name in names},
    )
    return sequence("processors", of_bytes, template) if family.byte_steps else template


# ---- vocabularies ----------------------------------------------------------------------------------------------------

LINES = [line for line in TRAINED_ON.split("\n") if line] * 2


@functools.cache
def byte_vocabulary(name: str) -> tuple[dict, Files]:
    """A byte-level BPE, trained with the family's pre-tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    family = FAMILIES[name]
    made = Tokenizer.from_str(
        json.dumps(dict(json.loads(Tokenizer(models.BPE()).to_str()), pre_tokenizer=family.pre_tokenizer))
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[token.content for token in family.inside],
    )
    made.train_from_iterator([TRAINED_ON, *LINES], trainer)
    model = (
        json.loads(made.to_str())["model"] | dict(continuing_subword_prefix="", end_of_word_suffix="") | family.model
    )
    if name == "gpt2":  # at the end of its vocabulary
        model["vocab"]["<|endoftext|>"] = len(model["vocab"])
    merges = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in model["merges"])
    return model, {"vocab.json": model["vocab"], "merges.txt": merges}


@functools.cache
def piece_vocabulary(name: str) -> tuple[dict, Files]:
    """SentencePiece's BPE with byte fallback; merges as transformers reads them off the pieces."""
    from sentencepiece import sentencepiece_model_pb2
    from transformers.tokenization_utils_base import generate_merges

    family, gemma = FAMILIES[name], name.startswith("gemma")
    names = {token.content: token.special for token in family.inside}
    ends = dict(unk_id=3, bos_id=2, eos_id=1, pad_id=0) if gemma else dict(unk_id=0, bos_id=1, eos_id=2)
    ends |= dict(bos_piece="<bos>", eos_piece="<eos>") if gemma else {}
    others = {
        one: is_special
        for one, is_special in names.items()
        if one not in ("<unk>", "<s>", "</s>", "<pad>", "<eos>", "<bos>")
    }
    data = trained_pieces(
        "bpe",
        vocab_size=900,
        byte_fallback=True,
        add_dummy_prefix=not gemma,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        **ends,
        control_symbols=[one for one, is_special in others.items() if is_special],
        user_defined_symbols=[one for one, is_special in others.items() if not is_special],
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    vocab = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    merges = [list(pair) for pair in generate_merges(vocab)]
    model = dict(
        type="BPE",
        dropout=None,
        unk_token="<unk>",
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=False,
        vocab=vocab,
        merges=merges,
    )
    return model, {"tokenizer.model": data}


@functools.cache
def unigram_vocabulary(name: str) -> tuple[dict, Files]:
    """SentencePiece's unigram model, with its normalization."""
    from sentencepiece import sentencepiece_model_pb2

    data = trained_pieces(
        "unigram",
        vocab_size=700,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        character_coverage=1.0,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    vocab = [[piece.piece, piece.score] for piece in proto.pieces]
    vocab += [[f"<extra_id_{n}>", 0.0] for n in reversed(range(100))]
    model = dict(type="Unigram", unk_id=2, vocab=vocab, byte_fallback=False)
    return model, {"spiece.model": data}


@functools.cache
def word_vocabulary(name: str) -> tuple[dict, Files]:
    """BERT's WordPiece."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    names = [token.content for token in FAMILIES[name].inside]
    made.train_from_iterator(
        LINES, trainers.WordPieceTrainer(vocab_size=700, special_tokens=names, show_progress=False)
    )
    model = json.loads(made.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return model, {"vocab.txt": "".join(f"{word}\n" for word in words)}


VOCABULARIES = dict(bytes=byte_vocabulary, pieces=piece_vocabulary, unigram=unigram_vocabulary, words=word_vocabulary)


def trained_pieces(kind: str, **options) -> bytes:
    from sentencepiece import SentencePieceTrainer

    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=out, model_type=kind, minloglevel=2, num_threads=1, **options
    )
    return out.getvalue()


def charsmap(files: Files) -> bytes:
    """SentencePiece's table of normalized characters."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(files["spiece.model"]).normalizer_spec.precompiled_charsmap
