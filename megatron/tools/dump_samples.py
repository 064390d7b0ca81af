# SPDX-License-Identifier: Apache-2.0
"""Print training samples as JSON lines, in the order in which training reads them.

    python -m megatron.tools.dump_samples --data-path corpus_text_document --seq-length 1024 --seed 1234 \
        --split 969,30,1 --train-samples 16000 --first 3 --text --tokenizer-type GPT2BPETokenizer \
        --vocab-file vocab.json --merge-file merges.txt
    python -m megatron.tools.dump_samples --data-path corpus_text_document --train-samples 16000 --text --load CHECKPOINTS

Each sample is a line, in the order of training (step k takes samples [k x global batch, (k + 1) x global batch)): its
place, the token file, its number there before the shuffle, its pieces as [document, offset, length], and its
seq_length + 1 token ids, with the loss mask of --dataset-type webtext. The order depends on all of the flags above
except --first and --text.

With --model-type BERT or T5 these are samples of masked models: the sentences of each as [sentence, offset, length], and
its arrays without padding; with --text, masks and sentinels are shown in the words.
"""

import json
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, Optional

from megatron.data.masked_settings import GROUP, MASKED_RULES, MaskedSettings
from megatron.errors import DataError, SettingsError, run_main
from megatron.settings.declare import dashed
from megatron.settings.from_checkpoint import tokenizer_of_checkpoint
from megatron.settings.groups.tokenizer import idle_words
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Data, TokenizerSettings, setting
from megatron.settings.statements import given_values


@dataclass(frozen=True)
class DumpOptions:
    """The samples to print, and their format."""

    train_samples: int = setting("samples that the whole training takes: decides on epochs and so on the order")
    seq_length: int = setting("tokens of a training sample", 1024, "--max-seq-len", "--encoder-seq-length")
    seed: int = setting("seed of the order", 1234)
    dataset: Literal["train", "valid", "test"] = setting("which of the three parts", "train")
    valid_samples: int = setting("samples of validation (with --dataset valid)", 1)
    test_samples: int = setting("samples of testing (with --dataset test)", 1)
    first: int = setting("how many samples", 10)
    start: int = setting("place of the first one: samples consumed so far", 0)
    model_type: Literal["GPT", "BERT", "T5"] = setting("the model that the samples are for", "GPT")
    decoder_seq_length: Optional[int] = setting("tokens of a target (--model-type T5; default: 128)", None)
    bert_binary_head: bool = setting(
        "--model-type BERT: samples of two pieces of text that follow each other or not",
        True,
        "--bert-no-binary-head=false",
    )
    text: bool = setting("decode the tokens; needs --load, or the tokenizer's flags", False)
    load: Optional[str] = setting("folder of checkpoints (an import, or a run) whose tokenizer is taken", None)


COMMON = (
    "data_path",
    "split",
    "train_samples",
    "seq_length",
    "seed",
    "dataset",
    "first",
    "start",
    "text",
    "load",
    "vocab_file",
    "merge_file",
    "tokenizer_type",
    "tokenizer_model",
)


def main(argv: list[str]) -> None:
    """Parse, build the dataset, print."""
    groups, said = parse_with_record(
        argv,
        dict(dump=DumpOptions, data=Data, tokenizer=TokenizerSettings, masked=MaskedSettings),
        prog="python -m megatron.tools.dump_samples",
        description="Print training samples as JSON lines, in the order in which training reads them.",
        common=COMMON,
    )
    dump, data = groups["dump"], groups["data"]
    for name, least in dict(train_samples=1, seq_length=1, first=0, start=0).items():
        if getattr(dump, name) < least:
            words = f"{dashed(name)} {getattr(dump, name)}"
            raise SettingsError(f"{words}: has to be {'at least 1' if least else '0 or more'}")
    masked = dump.model_type != "GPT"
    why = "--text" if dump.text else f"--model-type {dump.model_type}"
    named = groups["tokenizer"]
    if dump.load:
        named = tokenizer_of_checkpoint(dump.load, given_values(TokenizerSettings, said))
    tokenizer = _tokenizer(named, why if dump.text or masked and not data.mock_data else "")
    vocab_size = named.vocab_size if tokenizer is None and data.mock_data else None
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    if dump.text:
        from megatron.data.remote import all_paths
        from megatron.data.vocabulary import refuse_other_vocabulary

        refuse_other_vocabulary(all_paths(data, _log), tokenizer)
    dataset = _dataset(dump, data, groups["masked"], vocab_size, tokenizer)
    for record in records(dataset, data.dataloader_type, dump.start, dump.first, tokenizer if dump.text else None):
        sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def records(dataset, dataloader_type: str, start: int, count: int, tokenizer=None):
    """Yield a dict per sample, for places [start, start + count) in the order of training. tokenizer: also decode them."""
    if dataloader_type == "cyclic":
        from megatron.data.loader import cyclic_order
        from megatron.data.sampler import cyclic_position
    for position in range(start, start + count if dataloader_type == "cyclic" else min(start + count, len(dataset))):
        index = position
        if dataloader_type == "cyclic":
            epoch, index = cyclic_position(position, len(dataset))
            index = int(cyclic_order(epoch, len(dataset))[index])
        record = dict(sample=position)
        if hasattr(dataset, "origin"):
            origin = dataset.origin(index)
            record.update(file=origin.prefix, number=origin.number, documents=[list(part) for part in origin.parts])
        sample = dataset[index]
        yield record | (_masked_record(sample, tokenizer) if isinstance(sample, dict) else _record(sample, tokenizer))


def _record(sample, tokenizer) -> dict:
    ids, *mask = sample if isinstance(sample, tuple) else (sample,)
    record = dict(tokens=ids.tolist()) | (dict(loss_mask=mask[0].tolist()) if mask else {})
    return record | (dict(text=tokenizer.decode(record["tokens"])) if tokenizer else {})


def _masked_record(sample: dict, tokenizer) -> dict:
    return arrays_of(sample) | (words_of(sample, tokenizer) if tokenizer else {})


def _dataset(dump: DumpOptions, data: Data, masked: MaskedSettings, vocab_size: Optional[int], tokenizer):
    from megatron.data.gpt_dataset import SPLITS, build_datasets

    which = SPLITS.index(dump.dataset)
    sizes = [0, 0, 0]
    sizes[which] = (dump.train_samples, dump.valid_samples, dump.test_samples)[which]
    if dump.model_type == "GPT":
        eod = None if tokenizer is None else tokenizer.eod
        built = build_datasets(data, dump.seq_length, sizes, dump.seed, eod=eod, vocab_size=vocab_size, log=_log)
    else:
        built = build_masked(dump, data, masked, tokenizer, vocab_size, sizes, _log)
    dataset = built[which]
    if dataset is None:
        raise DataError(f"there is no {dump.dataset} data", do="check --split and the data paths")
    if dump.start >= len(dataset) and data.dataloader_type == "single" and dump.first:
        raise DataError(f"--start {dump.start} is past the end: {dump.dataset} has {len(dataset)} samples")
    return dataset


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tokenizer(settings: TokenizerSettings, needed: str):
    """The tokenizer of the flags, or None if they describe none. Raises SettingsError if a flag, `needed`, needs one."""
    if not (settings.tokenizer_type or settings.vocab_file or settings.tokenizer_model):
        if needed:
            raise SettingsError(
                f"{needed} needs a tokenizer",
                do="--load CHECKPOINTS, --tokenizer-type with --vocab-file and --merge-file, or --tokenizer-model",
            )
        return None
    from megatron.tokenizer import build_tokenizer, tokenizer_type

    given = {name: value for name, value in vars(settings).items() if value}
    for words in idle_words(replace(settings, tokenizer_type=tokenizer_type(settings)), given):
        _log(f"note: {words}")
    return build_tokenizer(settings)


T5 = dict(text_enc="enc_mask", text_dec="dec_mask", labels="loss_mask")  # array -> the mask of what is no padding


def build_masked(dump, data: Data, masked: MaskedSettings, tokenizer: Any, vocab_size: int, sizes, log) -> tuple:
    """(train, valid, test) that `pretrain_bert.py` or `pretrain_t5.py` would have; dump: the options of the command.

    Raises SettingsError for settings that they refuse.
    """
    config = SimpleNamespace(
        data=data,
        model=SimpleNamespace(seq_length=dump.seq_length),
        logging=SimpleNamespace(seed=dump.seed),
        extra={GROUP: masked, "dump": dump},
    )
    seen = SimpleNamespace(**vars(data), seq_length=dump.seq_length, train_epochs=None, settings=config)
    if wrong := [rule.message(seen) for rule in MASKED_RULES if rule.broken(seen)]:
        raise SettingsError("; ".join(wrong))
    if dump.model_type == "T5":
        from megatron.data import t5_dataset

        return t5_dataset.build_datasets(config, tokenizer, vocab_size, sizes, log)
    from megatron.data import bert_dataset

    return bert_dataset.build_datasets(config, tokenizer, vocab_size, sizes, log, heads=True)


def arrays_of(sample: dict) -> dict:
    """The arrays of a sample as lists, without their padding."""
    if "text_enc" in sample:
        return {name: sample[name][sample[mask] > 0].tolist() for name, mask in T5.items()} | _numbers(sample)
    real = sample["padding_mask"] > 0
    names = ("text", "types", "labels", "loss_mask")
    return {name: sample[name][real].astype(int).tolist() for name in names} | _numbers(sample)


def _numbers(sample: dict) -> dict:
    return {name: int(array) for name, array in sample.items() if array.ndim == 0}


def words_of(sample: dict, tokenizer: Any) -> dict[str, str]:
    """The sample as text. BERT's has [the token that was there -> the one that is read] for each masked token."""
    if "text_enc" in sample:
        return {f"{name}_words": tokenizer.decode(sample[name][sample[mask] > 0]) for name, mask in T5.items()}
    words, run = [], []
    real = sample["padding_mask"] > 0
    triples = zip(sample["text"][real].tolist(), sample["labels"][real].tolist(), sample["loss_mask"][real].tolist())
    for token, was, counts in triples:
        if not counts:
            run.append(token)
            continue
        words += [tokenizer.decode(run)] * bool(run) + [f"[{tokenizer.decode([was])} -> {tokenizer.decode([token])}]"]
        run = []
    return dict(words=" ".join(words + [tokenizer.decode(run)] * bool(run)))


if __name__ == "__main__":
    run_main(main)
