# SPDX-License-Identifier: Apache-2.0
"""Published families of tokenizers: what their tokenizer.json and tokenizer_config.json say, but for the vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

SPACE, BAR = "\u2581", "\uff5c"

# ---- parts of tokenizer.json -----------------------------------------------------------------------------------------


class Added(NamedTuple):
    """An added token."""

    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def special(names: str, **flags: bool) -> tuple[Added, ...]:
    """Added tokens of names with spaces between them."""
    return tuple(Added(name, **flags) for name in names.split())


def plain(names: str, **flags: bool) -> tuple[Added, ...]:
    return special(names, special=False, **flags)


def byte_level(regex: bool = False, **more: Any) -> dict:
    return dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=regex) | more


def metaspace(scheme: str, split: bool) -> dict:
    return dict(type="Metaspace", replacement=SPACE, prepend_scheme=scheme, split=split)


def split(pattern: str) -> dict:
    return dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


def sequence(kind: str, *steps: dict) -> dict:
    return {"type": "Sequence", kind: list(steps)}


def replaced(pattern: str = " ", content: str = SPACE) -> dict:
    return dict(type="Replace", pattern=dict(String=pattern), content=content)


def cut_by(*patterns: str) -> dict:
    """The pre-tokenizer of a byte-level BPE."""
    return sequence("pretokenizers", *map(split, patterns), byte_level())


CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = LLAMA3.replace("{1,3}", "")
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = rf"{_WORD[0]}(?i:{CONTRACTIONS})?|{_WORD[1]}(?i:{CONTRACTIONS})?|\p{{N}}{{1,3}}|{_END}"
TEKKEN = rf"{_WORD[0]}|{_WORD[1]}|\p{{N}}|{_END}"
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
DIGITS = dict(type="Digits", individual_digits=True)
DIGITS_OF_WORDS = sequence("pretokenizers", DIGITS, byte_level(True))
CUT_AT_SPACES = dict(type="Split", pattern=dict(String=" "), behavior="MergedWithPrevious", invert=False)
PREPENDED = sequence("normalizers", dict(type="Prepend", prepend=SPACE), replaced())
_PIECES = replaced(SPACE, " "), dict(type="ByteFallback"), dict(type="Fuse")
PIECES = sequence("decoders", *_PIECES)
STRIPPED = sequence("decoders", *_PIECES, dict(type="Strip", content=" ", start=1, stop=0))


# ---- families --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Family:
    """A published tokenizer.

    kind           of its vocabulary: bytes, pieces (SentencePiece's BPE), unigram, words (WordPiece)
    pre_tokenizer, normalizer, decoder     steps of tokenizer.json. normalizer "precompiled": of the SentencePiece model
    before, after  names that the post-processor puts around a prompt; byte_steps: it has ByteLevel before that
    inside         added tokens at the beginning of the vocabulary; beyond: those behind it
    model          further fields of the model
    config         tokenizer_config.json; model_type: of config.json; ends: of generation_config.json
    template       of conversations, by the name of templates.py
    """

    kind: str
    config: Mapping[str, Any]
    model_type: str
    pre_tokenizer: Any = None
    normalizer: Union[None, str, dict] = None
    decoder: Any = None
    before: str = ""
    after: str = ""
    byte_steps: bool = False
    inside: tuple[Added, ...] = ()
    beyond: tuple[Added, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    template: str = ""
    ends: str = ""


def of_llama(normalizer=PREPENDED, pre_tokenizer=None, **more) -> Family:
    """SentencePiece's BPE with a space before texts."""
    steps = dict(pre_tokenizer=pre_tokenizer, normalizer=normalizer, decoder=STRIPPED)
    return Family(**(dict(kind="pieces", **steps, before="<s>", inside=LLAMA_ENDS, ends="</s>") | more))


def of_gemma(**more) -> Family:
    steps = dict(pre_tokenizer=CUT_AT_SPACES, normalizer=replaced(), decoder=PIECES)
    return Family(kind="pieces", **steps, before="<bos>", template="gemma", ends="<eos> <end_of_turn>", **more)


def of_bytes(pre_tokenizer, **more) -> Family:
    return Family(**(dict(kind="bytes", pre_tokenizer=pre_tokenizer, decoder=byte_level(True)) | more))


LLAMA_ENDS = special("<unk> <s> </s>")
LLAMA = dict(tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True)
LLAMA |= dict(add_eos_token=False, clean_up_tokenization_spaces=False, model_max_length=4096, sp_model_kwargs={})
MISTRAL = special("[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]")
GPT2 = dict(tokenizer_class="GPT2Tokenizer", add_prefix_space=False)
ALL_ENDS = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
FAST = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=True)
QWEN_CONFIG = dict(tokenizer_class="Qwen2Tokenizer", add_bos_token=False, add_prefix_space=False, errors="replace")
QWEN_CONFIG |= dict(eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None, unk_token=None)
QWEN_CONFIG |= dict(split_special_tokens=False, additional_special_tokens=["<|im_start|>", "<|im_end|>"])
QWEN = special("<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|vision_pad|>")
QWEN += plain("<tool_call> </tool_call> <|fim_prefix|> <|file_sep|>")
GEMMA = special("<pad> <eos> <bos> <unk> <mask>") + plain("<2mass> [@BOS@] <unused0> <unused1>")
GEMMA_TURNS = special("<start_of_turn> <end_of_turn>")
GEMMA_RUNS = tuple(Added(run, False) for run in ("\n", "\n\n", "\n\n\n", *(SPACE * n for n in range(2, 9))))
GEMMA_RUNS += plain("<table> </b> <b>")
GEMMA_CONFIG = dict(tokenizer_class="GemmaTokenizer", add_bos_token=True, add_eos_token=False, sp_model_kwargs={})
GEMMA_CONFIG |= dict(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
IMAGES = dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
DEEP = [f"<{BAR}{name}{BAR}>".replace(" ", SPACE) for name in ("begin of sentence", "end of sentence", " pad ")]
DEEP_MORE = f"<{BAR}fim{SPACE}hole{BAR}> <{BAR}place{SPACE}holder{SPACE}no{SPACE}0{BAR}>"
DEEP_TURNS = f"<{BAR}User{BAR}> <{BAR}Assistant{BAR}> <|EOT|> <{BAR}tool{SPACE}calls{SPACE}begin{BAR}> <think>"
LLAMA3_NAMES = "<|begin_of_text|> <|end_of_text|> <|reserved_special_token_0|> <|finetune_right_pad_id|> <|eot_id|>"
LLAMA3_NAMES += " <|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>"
HARMONY = "<|startoftext|> <|endoftext|> <|reserved_200000|> <|return|> <|constrain|> <|channel|> <|start|> <|end|>"
HARMONY += " <|message|> <|call|> <|endofprompt|>"
STAR = special("<|endoftext|> <fim_prefix> <fim_middle> <fim_suffix> <fim_pad> <repo_name> <file_sep>")
EXTRA = [f"<extra_id_{number}>" for number in range(100)]

FAMILIES = dict(
    llama2=of_llama(config=LLAMA | dict(legacy=False, padding_side="right"), template="llama2", model_type="llama"),
    mistral1=of_llama(
        config=LLAMA
        | dict(legacy=True, additional_special_tokens=[], spaces_between_special_tokens=False, pad_token=None),
        template="mistral1",
        model_type="mistral",
    ),
    mistral3=of_llama(
        normalizer=None,
        pre_tokenizer=metaspace("first", False),
        inside=LLAMA_ENDS + MISTRAL + special("[control_8] [control_9]"),
        config=LLAMA | dict(legacy=False, add_prefix_space=None, additional_special_tokens=[]),
        template="mistral3",
        model_type="mistral",
    ),
    phi3=of_llama(
        before="",
        inside=special("<unk> <s>") + plain("</s>", rstrip=True),
        beyond=special("<|endoftext|>")
        + special("<|assistant|> <|placeholder1|> <|system|> <|end|> <|user|>", rstrip=True),
        config=LLAMA | dict(eos_token="<|endoftext|>", pad_token="<|endoftext|>", add_bos_token=False, legacy=False),
        template="phi3",
        ends="<|endoftext|> <|assistant|> <|end|>",
        model_type="phi3",
    ),
    gemma2=of_gemma(
        inside=GEMMA + GEMMA_TURNS + GEMMA_RUNS,
        config=GEMMA_CONFIG | dict(additional_special_tokens=["<start_of_turn>", "<end_of_turn>"], legacy=None),
        model_type="gemma2",
    ),
    gemma3=of_gemma(
        inside=GEMMA + GEMMA_TURNS + special("<start_of_image> <end_of_image>") + GEMMA_RUNS,
        beyond=special("<image_soft_token>"),
        config=GEMMA_CONFIG | IMAGES | dict(extra_special_tokens=IMAGES, processor_class="Gemma3Processor"),
        model_type="gemma3_text",
    ),
    llama3=of_bytes(
        cut_by(LLAMA3),
        before="<|begin_of_text|>",
        byte_steps=True,
        beyond=special(LLAMA3_NAMES),
        model=dict(ignore_merges=True),
        config=FAST | dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", model_input_names=["input_ids"]),
        template="llama3",
        ends="<|end_of_text|> <|eom_id|> <|eot_id|>",
        model_type="llama",
    ),
    qwen2=of_bytes(
        cut_by(QWEN2),
        normalizer=dict(type="NFC"),
        decoder=byte_level(),
        beyond=QWEN,
        config=QWEN_CONFIG,
        template="qwen2",
        ends="<|im_end|> <|endoftext|>",
        model_type="qwen2",
    ),
    qwen3=of_bytes(
        cut_by(QWEN2),
        normalizer=dict(type="NFC"),
        decoder=byte_level(),
        beyond=QWEN + plain("<tool_response> </tool_response> <think> </think>"),
        config=QWEN_CONFIG,
        template="qwen3",
        ends="<|im_end|> <|endoftext|>",
        model_type="qwen3",
    ),
    tekken=of_bytes(
        cut_by(TEKKEN),
        before="<s>",
        inside=LLAMA_ENDS + MISTRAL + special("<pad> [PREFIX] [MIDDLE] [SUFFIX] <SPECIAL_14> <SPECIAL_15>"),
        model=dict(ignore_merges=True),
        config=GPT2 | dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", add_bos_token=True),
        template="tekken",
        ends="</s>",
        model_type="mistral",
    ),
    phi4=of_bytes(
        cut_by(CL100K),
        beyond=special(
            "<|dummy_0|> <|endoftext|> <|fim_prefix|> <|im_start|> <|im_end|> <|im_sep|>", lstrip=True, rstrip=True
        ),
        config=GPT2 | ALL_ENDS | dict(eos_token="<|im_end|>", pad_token="<|dummy_0|>"),
        template="phi4",
        ends="<|endoftext|> <|im_end|>",
        model_type="phi3",
    ),
    deepseek3=of_bytes(
        cut_by(*DEEPSEEK),
        normalizer=sequence("normalizers"),
        before=DEEP[0],
        inside=special(" ".join(DEEP)),
        beyond=special(DEEP_MORE) + plain(DEEP_TURNS),
        config=LLAMA
        | dict(tokenizer_class="LlamaTokenizerFast", legacy=True, bos_token=DEEP[0], eos_token=DEEP[1], unk_token=None),
        template="deepseek3",
        ends=DEEP[1],
        model_type="deepseek_v3",
    ),
    gpt2=of_bytes(
        byte_level(True),
        beyond=special("<|endoftext|>", normalized=True),
        config=GPT2 | ALL_ENDS | dict(model_max_length=1024),
        ends="<|endoftext|>",
        model_type="gpt2",
    ),
    gpt_oss=of_bytes(
        cut_by(O200K),
        beyond=special(HARMONY),
        config=FAST | dict(bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>"),
        template="harmony",
        ends="<|return|> <|endoftext|> <|call|>",
        model_type="gpt_oss",
    ),
    olmo2=of_bytes(
        cut_by(CL100K),
        beyond=special("<|endoftext|> <|fim_prefix|> <|im_start|> <|im_end|> <|pad|>")
        + plain("|||IP_ADDRESS||| |||EMAIL_ADDRESS|||", normalized=True),
        config=GPT2 | ALL_ENDS | dict(pad_token="<|pad|>"),
        template="olmo2",
        ends="<|endoftext|>",
        model_type="olmo2",
    ),
    smollm=of_bytes(
        DIGITS_OF_WORDS,
        inside=special(
            "<|endoftext|> <|im_start|> <|im_end|> <repo_name> <reponame> <file_sep> <filename> <jupyter_start>"
        ),
        config=GPT2
        | ALL_ENDS
        | dict(bos_token="<|im_start|>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]),
        template="chatml",
        ends="<|im_end|>",
        model_type="llama",
    ),
    falcon=of_bytes(
        sequence(
            "pretokenizers",
            dict(type="Punctuation", behavior="Contiguous"),
            byte_level(True),
            dict(type="Digits", individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ),
        inside=special(">>TITLE<< >>ABSTRACT<< >>INTRODUCTION<< >>ANSWER<< <|endoftext|>"),
        config=FAST | dict(add_prefix_space=False, eos_token="<|endoftext|>", special_tokens_map_file=None),
        template="falcon",
        ends="<|endoftext|>",
        model_type="falcon",
    ),
    starcoder=of_bytes(
        DIGITS_OF_WORDS,
        inside=STAR,
        config=GPT2 | ALL_ENDS | dict(vocab_size=49152, additional_special_tokens=[one.content for one in STAR]),
        ends="<|endoftext|>",
        model_type="starcoder2",
    ),
    t5=Family(
        kind="unigram",
        pre_tokenizer=sequence("pretokenizers", dict(type="WhitespaceSplit"), metaspace("always", True)),
        normalizer="precompiled",
        decoder=metaspace("always", True),
        after="</s>",
        inside=special("<pad> </s> <unk>"),
        beyond=special(" ".join(EXTRA)),
        config=dict(
            tokenizer_class="T5Tokenizer", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", extra_ids=100
        )
        | dict(sp_model_kwargs={}, additional_special_tokens=EXTRA),
        ends="</s>",
        model_type="t5",
    ),
    bert=Family(
        kind="words",
        pre_tokenizer=dict(type="BertPreTokenizer"),
        normalizer=dict(
            type="BertNormalizer", clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=True
        ),
        decoder=dict(type="WordPiece", prefix="##", cleanup=True),
        before="[CLS]",
        after="[SEP]",
        inside=special("[PAD] [UNK] [CLS] [SEP] [MASK]"),
        config=dict(
            tokenizer_class="BertTokenizer", do_lower_case=True, strip_accents=None, tokenize_chinese_chars=True
        )
        | {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")},
        model_type="bert",
    ),
)
