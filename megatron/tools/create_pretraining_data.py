# SPDX-License-Identifier: Apache-2.0
"""Convert loose JSON lines to PaddlePaddle's token files (_ids.npy and _idx.npz), as PaddleNLP does.

    python -m megatron.tools.create_pretraining_data --model_name gpt2-en --tokenizer_name GPTTokenizer \\
        --data_format JSON --input_path openwebtext/ --append_eos --output_prefix gpt_openwebtext --workers 40

PaddleNLP's command with its flags and files: gpt_openwebtext_ids.npy and gpt_openwebtext_idx.npz. --model_name is a
folder with the vocabulary, or its name in $MEGATRON_CACHE; --vocab-file and --merge-file name the files themselves.
"""

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, replace
from typing import ClassVar, Literal, Optional

from megatron.errors import DataError, SettingsError, run_main
from megatron.settings import rank_env
from megatron.settings.declare import Needs, declared, idle_flags
from megatron.settings.groups.tokenizer import WORD_PIECE
from megatron.settings.positional import refuse_below
from megatron.settings.schema import TokenizerSettings, setting


@dataclass(frozen=True)
class CreateOptions:
    """Input, processing and output. Names are those of `data.preprocess`; PaddleNLP's are aliases."""

    input: list[str] = setting("JSON lines: a file or a folder; .zst, .gz, .bz2, .xz too", MISSING, "--input-path")
    output_prefix: str = setting("files are named <prefix>_ids.npy and <prefix>_idx.npz")
    model_name: Optional[str] = setting("folder with the vocabulary, or its name in $MEGATRON_CACHE", None)
    data_format: Literal["JSON"] = setting("one JSON object a line is the only format", "JSON")
    data_impl: Optional[Literal["mmap", "lazy"]] = setting("PaddleNLP's choice of .bin and .idx; see the note", None)
    json_keys: Optional[list[str]] = setting("key whose text is taken (default: text)", None, "--json-key")
    split_sentences: bool = setting("one sequence per sentence instead of one per document", False)
    sentence_splitter: Literal["auto", "nltk", "sentencex"] = setting(
        "of text that is not --chinese; auto: nltk, as PaddleNLP, where it has its punkt data",
        "auto",
        needs="split_sentences",
    )
    lang: str = setting("language of --split-sentences", "english", needs="split_sentences")
    chinese: bool = setting("sentences of --split-sentences are lines", False, needs="split_sentences")
    cn_whole_word_segment: bool = setting("mark the inner characters of Chinese words, for masking whole words", False)
    cn_seg_func: Literal["jieba", "lac", "seg"] = setting(
        "what finds the words of --cn-whole-word-segment",
        "jieba",
        needs=Needs("--cn-whole-word-segment", lambda s: s.cn_whole_word_segment and not s.cn_splited),
    )
    cn_splited: bool = setting("the text is cut into words already: --cn-seg-func is not needed", False)
    cn_split_dimer: str = setting("what stands between the words of --cn-splited text", " ", needs="cn_splited")
    append_eod: bool = setting("put the end-of-document token after each document", False, "--append-eos")
    workers: int = setting("processes; the output does not depend on it", 1)
    on_bad_line: Literal["skip", "stop"] = setting("stop: end with exit code 4 at a line that is no document", "skip")
    origin: bool = setting("write <prefix>.origin: from which file and byte each document comes", True)
    log_interval: int = setting("documents between progress lines", 100)
    debug: bool = setting("tracebacks with error messages", False)

    lines_only: ClassVar[bool] = True
    document_separator: ClassVar[Optional[str]] = None
    contamination: ClassVar[Optional[str]] = None
    on_contamination: ClassVar[str] = "count"
    output_format: ClassVar[str] = "paddle"
    partitions: ClassVar[int] = 1
    keep_sequential_samples: ClassVar[bool] = True
    keep_newlines: ClassVar[bool] = False


BOTH = Needs(  # WordPiece has one file
    "the other one of --vocab-file and --merge-file: --model-name names both",
    lambda s: s.merge_file and s.vocab_file or s.tokenizer in WORD_PIECE,
)


def main(argv: list[str]) -> None:
    start = time.perf_counter()
    from megatron.settings.parse import parse_with_record

    groups = dict(create=CreateOptions, tokenizer=TokenizerSettings)
    prog = "python -m megatron.tools.create_pretraining_data"
    common = tuple(CreateOptions.__dataclass_fields__) + ("tokenizer_type",)
    argv, mark = take_mark(argv)
    parsed, given = parse_with_record(argv, groups, prog=prog, description=__doc__.split("\n")[0], common=common)
    settings = check(parsed["create"] if mark is None else replace(parsed["create"], cn_split_dimer=mark))
    vocabulary = parsed["tokenizer"]
    if settings.model_name and vocabulary.tokenizer_model is None:
        vocabulary = replace(vocabulary, tokenizer_model=settings.model_name)
    if settings.data_impl:
        print(
            f"note: --data-impl {settings.data_impl} has no effect: _ids.npy and _idx.npz are written, which training "
            "reads as well; python preprocess_data.py writes .bin and .idx",
            file=sys.stderr,
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave by the `finally` clauses

    from megatron.data.json_input import find_sources
    from megatron.data.preprocess import preprocess_and_report
    from megatron.tokenizer import tokenizer_type

    find_sources(settings.input, lines_only=True)  # report wrong files before reading a vocabulary
    named = dict(vocab_file=BOTH, merge_file=BOTH) if settings.model_name else {}
    of_tokenizer = idle_flags(
        vocabulary, given, declared("needs", vocabulary) | named, tokenizer=tokenizer_type(vocabulary)
    )
    rank_env.print_notes([*idle_flags(settings, given), *of_tokenizer])
    tokenizer = make_tokenizer(settings, vocabulary)
    if settings.append_eod and tokenizer.eod is None:
        print(f"note: {tokenizer.name} has no token that ends a document: nothing is appended, as in PaddleNLP")
        settings = replace(settings, append_eod=False)
    print(f"> {tokenizer.name}, {tokenizer.vocab_size} tokens", flush=True)
    preprocess_and_report(settings, tokenizer, start, make_split(settings))


def take_mark(argv: list[str]) -> tuple[list[str], Optional[str]]:
    """Split off a `--cn_split_dimer` of white space, which the parser refuses: (rest of the command line, mark).

    >>> take_mark(["--cn_split_dimer", "\\t", "--chinese"])
    (['--chinese'], '\\t')
    """
    rest, mark = list(argv), None
    for name in ("--cn_split_dimer", "--cn-split-dimer"):
        for place, word in reversed(list(enumerate(rest))):
            value = word.removeprefix(f"{name}=") if word != name else "".join(rest[place + 1 : place + 2])
            if word.startswith(name) and value and value.isspace():
                mark = value
                del rest[place : place + (2 if word == name else 1)]
    return rest, mark


def check(settings: CreateOptions) -> CreateOptions:
    """Fill in the default key. Raises SettingsError for settings that cannot work together."""
    refuse_below(settings, dict(workers=1, log_interval=1))
    keys = list(dict.fromkeys(settings.json_keys or ["text"]))
    if len(keys) > 1:
        do = "run it once for each key, with an --output-prefix of its own"
        raise SettingsError(f"--json-key {' '.join(keys)}: one key fills one pair of files", do=do)
    if settings.cn_splited and not settings.cn_whole_word_segment:
        why = "marks between words would be tokens like any other text"
        raise SettingsError("--cn-splited has no use without --cn-whole-word-segment", why, "add it, or drop the flag")
    return replace(settings, json_keys=keys)


def make_tokenizer(settings: CreateOptions, vocabulary: TokenizerSettings):
    """Build the tokenizer of the flags; with --cn-whole-word-segment it marks whole words."""
    from megatron.tokenizer import build_tokenizer, resolved
    from megatron.tokenizer.segmenters import make_segmenter, split_words

    vocabulary = resolved(vocabulary)
    kind, tokenizer = vocabulary.tokenizer_type, build_tokenizer(vocabulary, print)
    if not settings.cn_whole_word_segment:
        return tokenizer
    if kind not in WORD_PIECE:
        why = f"whole words are marked with '##', and {kind} has no such tokens"
        raise SettingsError(
            "--cn-whole-word-segment needs a WordPiece vocabulary", why, "--tokenizer-name ErnieTokenizer"
        )
    from megatron.tokenizer.word_piece import build_whole_words

    mark = settings.cn_split_dimer
    segment = (lambda text: split_words(text, mark)) if settings.cn_splited else make_segmenter(settings.cn_seg_func)
    return build_whole_words(vocabulary, segment)


def make_split(settings: CreateOptions) -> Callable[[str], list[str]]:
    """Build the function that splits a text into sequences, without white space at their ends."""
    if not settings.split_sentences:
        return lambda text: [text.strip()]
    if settings.chinese:
        return lambda text: [line.strip() for line in text.split("\n")]
    from megatron.data.sentences import make_splitter

    try:
        library = "nltk" if settings.sentence_splitter == "auto" else settings.sentence_splitter
        sentences = make_splitter(library, settings.lang, False)
    except DataError as lacking:
        if settings.sentence_splitter != "auto":
            raise
        print(f"note: sentences are split by sentencex ({lacking.what}; PaddleNLP's are nltk's)", flush=True)
        sentences = make_splitter("sentencex", settings.lang, False)
    return lambda text: [sentence.strip() for sentence in sentences(text)]


if __name__ == "__main__":
    run_main(main)
