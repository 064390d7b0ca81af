# SPDX-License-Identifier: Apache-2.0
"""WikiText: perplexity per word of the original, pre-tokenized text, so that vocabularies can be compared.

The published files are split into words by spaces (`tokens , and 1 @.@ 5`). The model reads natural text, so the text is
detokenized first, with the substitutions that published results use. The token ratio converts the loss per token to a
loss per original word.
"""

import re

# In this order: split text -> original text.
SUBSTITUTIONS = (
    (r"s '", "s'"),  # plural genitive
    (r" @([-,.])@ ", r"\1"),  # inside numbers and compounds
    (r" ([:;.!?,]) ", r"\1 "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^\}]*?)\s*\}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (" \u00b0 ", "\u00b0"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Convert WikiText's words to natural text.

    >>> detokenize("It cost 1 @.@ 5 million ( in 1999 ) , they say .")
    'It cost 1.5 million (in 1999), they say .'
    """
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    return text


def count_words(text: str) -> int:
    """Number of words of the original text, as published perplexities count them: pieces between single spaces."""
    return len(text.strip().split(" "))


def token_ratio(tokens: int, words: int) -> float:
    """Predicted tokens per predicted word."""
    return (tokens - 1) / (words - 1)
