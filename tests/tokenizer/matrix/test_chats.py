# SPDX-License-Identifier: Apache-2.0
"""Conversations: prompts, training with masks, and pairs of answers, compared with transformers' apply_chat_template.

Names of special tokens in messages are text here. transformers makes special tokens of them, so those conversations are
compared with what it makes of the same ones with the names broken by a mark, and by counting.
"""

import pytest

from megatron.tokenizer.chat_template import RefusedMessages, find_template
from tests.tokenizer.matrix.differences import assert_equal
from tests.tokenizer.matrix.layouts import FAMILIES, VARIANTS

TALKING = [name for name, (family, _) in VARIANTS.items() if FAMILIES[family].template and not name.endswith("alone")]
every_variant = pytest.mark.parametrize("variant", TALKING)


def template_of(matrix, variant: str, file=None):
    return find_template([matrix.folder(variant)], matrix.ours(variant), file)


def applied(theirs, messages, **more) -> list[int]:
    """transformers' ids of a conversation."""
    return theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **more)["input_ids"]


def is_plain(theirs, messages) -> bool:
    """Whether messages have no names of special tokens."""
    names = [token.content for token in theirs.added_tokens_decoder.values() if token.special]
    return not any(name in message["content"] for message in messages for name in names)


@pytest.mark.sampled(5)
@every_variant
def test_prompts(matrix, variant):
    theirs, template = matrix.theirs(variant), template_of(matrix, variant)

    def rows():
        for title, messages in matrix.talks(variant).items():
            for stop in range(len(messages)):
                if messages[stop]["role"] == "user":
                    continue
                prompt = messages[:stop]
                if not prompt or prompt[-1]["role"] != "user":
                    continue
                try:
                    expected = applied(theirs, prompt, add_generation_prompt=True)
                except Exception:  # a template is a program: this one refuses the messages
                    with pytest.raises(RefusedMessages):
                        template.encode(prompt)
                    continue
                found = template.encode(prompt)
                if is_plain(theirs, prompt):
                    yield title, str(prompt), expected, found
                else:
                    check_names_are_text(variant, theirs, template, prompt, found)

    assert_equal(f"{variant}, prompts", theirs, rows())


def check_names_are_text(variant, theirs, template, messages, found) -> None:
    """The special tokens are those of the same conversation without names; the text is the template's."""
    special = {id for id, token in theirs.added_tokens_decoder.items() if token.special and token.content != "<unk>"}
    harmless = [dict(message, content="x") for message in messages]
    expected = [id for id in applied(theirs, harmless, add_generation_prompt=True) if id in special]
    assert [id for id in found if id in special] == expected, f"{variant}: {messages}"
