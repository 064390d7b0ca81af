# SPDX-License-Identifier: Apache-2.0
"""Samples of BERT and T5 as records of `dump_samples`: without padding, and as text with masks and sentinels in it."""

from types import SimpleNamespace
from typing import Any

from megatron.data.masked_settings import GROUP, MASKED_RULES, MaskedSettings
from megatron.errors import SettingsError
from megatron.settings.schema import Data

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
