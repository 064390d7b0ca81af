# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face tokenizer with special tokens for turns of a conversation."""

from pathlib import Path

WORDS = "hello there what is the user system assistant brief"


def save_tokenizer(folder: Path, text: str = WORDS) -> Path:
    """Write tokenizer.json of a byte-level BPE of 400 tokens at most, trained on a text; returns the folder."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    made.train_from_iterator([text] * 9, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder
