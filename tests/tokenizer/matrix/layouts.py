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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.tokenizer.matrix.templates import TEMPLATES
from tests.tokenizer.matrix.texts import TRAINED_ON

Files = dict[str, Any]  # name -> text, bytes, or what JSON has

# ---- what families have ----------------------------------------------------------------------------------------------

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = LLAMA3.replace("{1,3}", "")
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{CONTRACTIONS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{CONTRACTIONS})?|\p{{N}}{{1,3}}|{_END}"
)
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_END}"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
SPACE = "\u2581"


class Added(NamedTuple):
    """An added token of tokenizer.json."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def plain(*names: str) -> tuple[Added, ...]:
    return tuple(Added(name, special=False) for name in names)


def special(*names: str, **flags) -> tuple[Added, ...]:
    return tuple(Added(name, **flags) for name in names)


def byte_level(regex: bool = False, **more) -> dict:
    return dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=regex) | more


def split(pattern: str) -> dict:
    return dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


def sequence(kind: str, *steps: dict) -> dict:
    return {"type": "Sequence", kind: list(steps)}


def replace_space(pattern: str = " ", content: str = SPACE) -> dict:
    return dict(type="Replace", pattern=dict(String=pattern), content=content)


def cut_by(*patterns: str) -> dict:
    """The pre-tokenizer of a byte-level BPE with published patterns."""
    return sequence("pretokenizers", *map(split, patterns), byte_level())


PIECES_DECODER = (replace_space(SPACE, " "), dict(type="ByteFallback"), dict(type="Fuse"))
STRIP = dict(type="Strip", content=" ", start=1, stop=0)
DIGITS = dict(type="Digits", individual_digits=True)


@dataclass(frozen=True)
class Family:
    """A published tokenizer.

    kind      of its vocabulary: bytes, pieces (SentencePiece's BPE), unigram, words (WordPiece)
    pre_tokenizer, normalizer, decoder   steps of tokenizer.json
    before, after    names that the post-processor puts around a prompt
    inside    added tokens at the beginning of the vocabulary; beyond: those behind it
    config    tokenizer_config.json; ends: names of the tokens of generation_config.json
    model     further fields of the model; model_type: of config.json
    """

    kind: str
    pre_tokenizer: Any = None
    normalizer: Any = None
    decoder: Any = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    inside: tuple[Added, ...] = ()
    beyond: tuple[Added, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    ends: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""
    byte_steps: bool = False  # its post-processor is a sequence with ByteLevel before the template


LLAMA_ENDS = special("<unk>", "<s>", "</s>")
LLAMA = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", tokenizer_class="LlamaTokenizer", add_bos_token=True)
LLAMA |= dict(add_eos_token=False, clean_up_tokenization_spaces=False, model_max_length=4096, sp_model_kwargs={})
FAST = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True)
_PREPENDED = sequence("normalizers", dict(type="Prepend", prepend=SPACE), replace_space())
_METASPACE = dict(type="Metaspace", replacement=SPACE, prepend_scheme="first", split=False)
MISTRAL = tuple(
    "[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]".split()
)
QWEN = special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|vision_pad|>")
QWEN += plain("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|file_sep|>")
BAR, LINE = "\uff5c", "\u2581"
DEEP = [
    f"<{BAR}begin{LINE}of{LINE}sentence{BAR}>",
    f"<{BAR}end{LINE}of{LINE}sentence{BAR}>",
    f"<{BAR}{LINE}pad{LINE}{BAR}>",
]
GEMMA = special("<pad>", "<eos>", "<bos>", "<unk>", "<mask>") + plain("<2mass>", "[@BOS@]", "<unused0>", "<unused1>")
GEMMA_RUNS = plain("\n", "\n\n", "\n\n\n", *(SPACE * n for n in range(2, 9)), "<table>", "</b>", "<b>")
STAR = special(
    "<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<repo_name>", "<file_sep>"
)
HARMONY = special(
    "<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|return|>", "<|constrain|>", "<|channel|>"
)
HARMONY += special("<|start|>", "<|end|>", "<|message|>", "<|call|>", "<|endofprompt|>")

FAMILIES = dict(
    llama2=Family(
        "pieces", None, _PREPENDED, sequence("decoders", *PIECES_DECODER, STRIP), ("<s>",), (), LLAMA_ENDS,
        config=LLAMA | dict(legacy=False, padding_side="right"), template="llama2", ends=("</s>",), model_type="llama",
    ),
    llama3=Family(
        "bytes", cut_by(LLAMA3), None, byte_level(True), ("<|begin_of_text|>",), (), (),
        special("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>",
                "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        FAST | dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", model_input_names=["input_ids"]),
        "llama3", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), dict(ignore_merges=True), "llama", True,
    ),
    qwen2=Family(
        "bytes", cut_by(QWEN2), dict(type="NFC"), byte_level(), (), (), (), QWEN,
        dict(tokenizer_class="Qwen2Tokenizer", add_bos_token=False, add_prefix_space=False, bos_token=None, errors="replace",
             eos_token="<|im_end|>", pad_token="<|endoftext|>", split_special_tokens=False, unk_token=None,
             additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|vision_pad|>"]),
        "qwen2", ("<|im_end|>", "<|endoftext|>"), {}, "qwen2", True,
    ),
    qwen3=Family(
        "bytes", cut_by(QWEN2), dict(type="NFC"), byte_level(), (), (), (),
        QWEN + plain("<tool_response>", "</tool_response>", "<think>", "</think>"),
        dict(tokenizer_class="Qwen2Tokenizer", add_bos_token=False, add_prefix_space=False, bos_token=None, errors="replace",
             eos_token="<|im_end|>", pad_token="<|endoftext|>", split_special_tokens=False, unk_token=None,
             additional_special_tokens=["<|im_start|>", "<|im_end|>"]),
        "qwen3", ("<|im_end|>", "<|endoftext|>"), {}, "qwen3", True,
    ),
    gemma2=Family(
        "pieces", dict(type="Split", pattern=dict(String=" "), behavior="MergedWithPrevious", invert=False),
        replace_space(), sequence("decoders", *PIECES_DECODER), ("<bos>",), (),
        GEMMA + special("<start_of_turn>", "<end_of_turn>") + GEMMA_RUNS,
        config=dict(tokenizer_class="GemmaTokenizer", add_bos_token=True, add_eos_token=False, bos_token="<bos>", legacy=None,
                    eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", sp_model_kwargs={}, spaces_between_special_tokens=False,
                    additional_special_tokens=["<start_of_turn>", "<end_of_turn>"], use_default_system_prompt=False),
        template="gemma", ends=("<eos>", "<end_of_turn>"), model_type="gemma2",
    ),
    gemma3=Family(
        "pieces", dict(type="Split", pattern=dict(String=" "), behavior="MergedWithPrevious", invert=False),
        replace_space(), sequence("decoders", *PIECES_DECODER), ("<bos>",), (),
        GEMMA + special("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>") + GEMMA_RUNS,
        special("<image_soft_token>"),
        dict(tokenizer_class="GemmaTokenizer", add_bos_token=True, add_eos_token=False, bos_token="<bos>", boi_token="<start_of_image>",
             eoi_token="<end_of_image>", image_token="<image_soft_token>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
             extra_special_tokens=dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
             sp_model_kwargs=None, spaces_between_special_tokens=False, processor_class="Gemma3Processor"),
        "gemma", ("<eos>", "<end_of_turn>"), {}, "gemma3_text",
    ),
    mistral1=Family(
        "pieces", None, _PREPENDED, sequence("decoders", *PIECES_DECODER, STRIP), ("<s>",), (), LLAMA_ENDS,
        config=LLAMA | dict(legacy=True, additional_special_tokens=[], spaces_between_special_tokens=False, pad_token=None),
        template="mistral1", ends=("</s>",), model_type="mistral",
    ),
    mistral3=Family(
        "pieces", _METASPACE, None, sequence("decoders", *PIECES_DECODER, STRIP), ("<s>",), (),
        LLAMA_ENDS + special(*MISTRAL) + special("[control_8]", "[control_9]"),
        config=LLAMA | dict(legacy=False, add_prefix_space=None, additional_special_tokens=[]),
        template="mistral3", ends=("</s>",), model_type="mistral",
    ),
    tekken=Family(
        "bytes", cut_by(TEKKEN), None, byte_level(True), ("<s>",), (),
        LLAMA_ENDS + special(*MISTRAL, "<pad>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "<SPECIAL_14>", "<SPECIAL_15>"),
        config=dict(tokenizer_class="GPT2Tokenizer", add_bos_token=True, add_prefix_space=False, bos_token="<s>", eos_token="</s>",
                    pad_token="<pad>", unk_token="<unk>", clean_up_tokenization_spaces=False),
        template="tekken", ends=("</s>",), model=dict(ignore_merges=True), model_type="mistral",
    ),
    phi3=Family(
        "pieces", None, _PREPENDED, sequence("decoders", *PIECES_DECODER, STRIP), (), (),
        (Added("<unk>"), Added("<s>"), Added("</s>", special=False, rstrip=True)),
        special("<|endoftext|>") + special("<|assistant|>", "<|placeholder1|>", "<|system|>", "<|end|>", "<|user|>", rstrip=True),
        LLAMA | dict(eos_token="<|endoftext|>", pad_token="<|endoftext|>", add_bos_token=False, legacy=False, padding_side="left"),
        "phi3", ("<|endoftext|>", "<|assistant|>", "<|end|>"), {}, "phi3",
    ),
    phi4=Family(
        "bytes", cut_by(CL100K), None, byte_level(True), (), (), (),
        special("<|dummy_0|>", "<|endoftext|>", "<|fim_prefix|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", lstrip=True, rstrip=True),
        dict(tokenizer_class="GPT2Tokenizer", add_prefix_space=False, bos_token="<|endoftext|>", eos_token="<|im_end|>",
             pad_token="<|dummy_0|>", unk_token="<|endoftext|>", clean_up_tokenization_spaces=False),
        "phi4", ("<|endoftext|>", "<|im_end|>"), {}, "phi3", True,
    ),
    deepseek3=Family(
        "bytes", cut_by(*DEEPSEEK), sequence("normalizers"), byte_level(True), (DEEP[0],), (),
        special(*DEEP),
        special(f"<{BAR}fim{LINE}hole{BAR}>", f"<{BAR}place{LINE}holder{LINE}no{LINE}0{BAR}>")
        + plain(f"<{BAR}User{BAR}>", f"<{BAR}Assistant{BAR}>", "<|EOT|>", f"<{BAR}tool{LINE}calls{LINE}begin{BAR}>", "<think>"),
        dict(tokenizer_class="LlamaTokenizerFast", add_bos_token=True, add_eos_token=False, bos_token=DEEP[0], eos_token=DEEP[1],
             pad_token=DEEP[1], unk_token=None, legacy=True, sp_model_kwargs={}, use_default_system_prompt=False),
        "deepseek3", (DEEP[1],), {}, "deepseek_v3",
    ),
    gpt2=Family(
        "bytes", byte_level(True), None, byte_level(True), (), (), (),
        (Added("<|endoftext|>", normalized=True),),
        dict(tokenizer_class="GPT2Tokenizer", bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>",
             add_prefix_space=False, model_max_length=1024),
        "", ("<|endoftext|>",), {}, "gpt2",
    ),
    gpt_oss=Family(
        "bytes", cut_by(O200K), None, byte_level(True), (), (), (), HARMONY,
        FAST | dict(bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>", extra_special_tokens={}),
        "harmony", ("<|return|>", "<|endoftext|>", "<|call|>"), {}, "gpt_oss",
    ),
    olmo2=Family(
        "bytes", cut_by(CL100K), None, byte_level(True), (), (), (),
        special("<|endoftext|>", "<|fim_prefix|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
        + (Added("|||IP_ADDRESS|||", special=False, normalized=True), Added("|||EMAIL_ADDRESS|||", special=False, normalized=True)),
        dict(tokenizer_class="GPT2Tokenizer", add_prefix_space=False, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
             pad_token="<|pad|>", unk_token="<|endoftext|>"),
        "olmo2", ("<|endoftext|>",), {}, "olmo2", True,
    ),
    t5=Family(
        "unigram", sequence("pretokenizers", dict(type="WhitespaceSplit"), _METASPACE | dict(prepend_scheme="always", split=True)),
        "precompiled", _METASPACE | dict(prepend_scheme="always", split=True), (), ("</s>",),
        special("<pad>", "</s>", "<unk>"), special(*(f"<extra_id_{n}>" for n in range(100))),
        dict(tokenizer_class="T5Tokenizer", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", extra_ids=100, sp_model_kwargs={},
             additional_special_tokens=[f"<extra_id_{n}>" for n in range(100)]),
        "", ("</s>",), {}, "t5",
    ),
    bert=Family(
        "words", dict(type="BertPreTokenizer"),
        dict(type="BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True),
        dict(type="WordPiece", prefix="##", cleanup=True), ("[CLS]",), ("[SEP]",), special("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        config=dict(tokenizer_class="BertTokenizer", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
                    mask_token="[MASK]", do_lower_case=True, strip_accents=None, tokenize_chinese_chars=True),
        model_type="bert",
    ),
    smollm=Family(
        "bytes", sequence("pretokenizers", DIGITS, byte_level(True)), None, byte_level(True), (), (),
        special("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<jupyter_start>"),
        config=dict(tokenizer_class="GPT2Tokenizer", add_prefix_space=False, bos_token="<|im_start|>", eos_token="<|im_end|>",
                    pad_token="<|im_end|>", unk_token="<|endoftext|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]),
        template="chatml", ends=("<|im_end|>",), model_type="llama",
    ),
    falcon=Family(
        "bytes",
        sequence("pretokenizers", dict(type="Punctuation", behavior="Contiguous"), byte_level(True),
                 dict(type="Digits", individual_digits=False), split("[0-9][0-9][0-9]")),
        None, byte_level(True), (), (),
        special(">>TITLE<<", ">>ABSTRACT<<", ">>INTRODUCTION<<", ">>ANSWER<<", "<|endoftext|>"),
        config=FAST | dict(add_prefix_space=False, eos_token="<|endoftext|>", name_or_path="tiiuae/falcon_tokenizer",
                           model_input_names=["input_ids", "attention_mask"], special_tokens_map_file=None),
        template="falcon", ends=("<|endoftext|>",), model_type="falcon",
    ),
    starcoder=Family(
        "bytes", sequence("pretokenizers", DIGITS, byte_level(True)), None, byte_level(True), (), (), STAR,
        config=dict(tokenizer_class="GPT2Tokenizer", add_prefix_space=False, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
                    unk_token="<|endoftext|>", vocab_size=49152, additional_special_tokens=[one.content for one in STAR]),
        ends=("<|endoftext|>",), model_type="starcoder2",
    ),
)  # fmt: skip

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
        Added("<left>", False, lstrip=True), Added("<right>", False, rstrip=True), Added("word", False, single_word=True),
        Added("<Normal>", False, normalized=True), Added("<|extra|>", True), Added("<|wide|>", True, lstrip=True, rstrip=True),
    )  # fmt: skip
    listed = {str(token["id"]): without_id(token) for token in files[JSON]["added_tokens"]}
    listed |= {str(first + number): token._asdict() for number, token in enumerate(more)}
    files[CONFIG]["added_tokens_decoder"] = listed


def tokens_of_old_files(files: Files) -> None:
    """Tokens of added_tokens.json, one of which special_tokens_map.json names: files of early versions of transformers."""
    first = size_of(files)
    files["added_tokens.json"] = {"<late>": first, "<|later|>": first + 1}
    files[CONFIG].pop("additional_special_tokens", None)
    files["special_tokens_map.json"] = dict(additional_special_tokens=["<|later|>"], pad_token="<|later|>")


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
    merged=without_slow(merges_of_names),
    unnamed=without_slow(without_names),
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
)  # fmt: skip
# transformers 5.23 does not read the slow files of a model of type olmo2, phi3 (Phi-4) or mistral (Tekken): it looks for
# tokenizer.json or tokenizer.model alone. Of Gemma 2's tokenizer.model it makes what that of Gemma 3 is.
_TABLE = """
llama2: usual bos no_bos eos legacy no_space parsed model alone listed added old merged unnamed slow slow_no_bos slow_eos
    slow_legacy slow_no_space slow_model slow_listed slow_added slow_old slow_unnamed
mistral1: usual new model old slow slow_new slow_model slow_added
mistral3: usual legacy model alone added slow slow_legacy slow_model slow_listed
phi3: usual bos model added unnamed slow slow_model slow_listed slow_added
gemma2: usual bos no_bos eos model alone listed added old merged
gemma3: usual model added slow slow_model slow_listed
llama3: usual bos no_bos eos model alone listed added old as_llama unnamed parsed
qwen2: usual bos eos space model alone added old unnamed slow slow_bos slow_model slow_listed slow_added slow_old
qwen3: usual model added slow slow_listed
tekken: usual model alone old merged
phi4: usual bos model alone slow slow_listed
deepseek3: usual bos no_bos model alone as_llama
gpt2: usual bos space model alone added slow slow_bos slow_space slow_model slow_listed slow_added slow_old slow_unnamed
gpt_oss: usual model alone added old
olmo2: usual model alone added slow_listed
smollm: usual bos model slow slow_bos
starcoder: usual model alone slow slow_space
falcon: usual no_bos model alone added old
t5: usual model alone added slow slow_added
bert: usual cased model alone added merged slow slow_cased slow_added
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
        version="1.0", truncation=None, padding=None, added_tokens=sorted(added, key=lambda one: one["id"]),
        normalizer=normalizer, pre_tokenizer=family.pre_tokenizer, post_processor=post_processor(family, ids),
        decoder=family.decoder, model=model,
    )  # fmt: skip
    files = {
        JSON: whole,
        CONFIG: json.loads(json.dumps(dict(family.config))),
        **slow_files,
        "model_type": family.model_type,
    }
    if family.template:
        files[CONFIG]["chat_template"] = TEMPLATES[family.template]
    ends = [ids[name] for name in family.ends]
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
    names = (*family.before, *family.after)
    if not names and not (family.kind == "pieces"):
        return of_bytes
    put = lambda name, kind: dict(SpecialToken=dict(id=name, type_id=kind))
    around = lambda of, kind: [
        *(put(name, kind) for name in family.before), dict(Sequence=dict(id=of, type_id=kind)),
        *(put(name, kind) for name in family.after),
    ]  # fmt: skip
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
        vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[token.content for token in family.inside],
    )  # fmt: skip
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
        "bpe", vocab_size=900, byte_fallback=True, add_dummy_prefix=not gemma, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True, **ends,
        control_symbols=[one for one, is_special in others.items() if is_special],
        user_defined_symbols=[one for one, is_special in others.items() if not is_special],
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(data)
    vocab = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    merges = [list(pair) for pair in generate_merges(vocab)]
    model = dict(
        type="BPE", dropout=None, unk_token="<unk>", continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=True,
        byte_fallback=True, ignore_merges=False, vocab=vocab, merges=merges,
    )  # fmt: skip
    return model, {"tokenizer.model": data}


@functools.cache
def unigram_vocabulary(name: str) -> tuple[dict, Files]:
    """SentencePiece's unigram model, with its normalization."""
    from sentencepiece import sentencepiece_model_pb2

    data = trained_pieces(
        "unigram", vocab_size=700, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc", character_coverage=1.0,
    )  # fmt: skip
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
