# SPDX-License-Identifier: Apache-2.0
"""Texts on which tokenizers are known to differ, conversations of them, and a text that vocabularies are trained on."""

import itertools
from collections.abc import Sequence

HARD = {
    "empty": "",
    "a space": " ",
    "a newline": "\n",
    "words": "Hello world, I'm sure they'll say it's fine.",
    "spaces at both ends": "  the king  ",
    "runs of spaces": "a  b   c    d     e",
    "newlines": "one\ntwo\n\nthree\n\n\nfour\n",
    "white space before newlines": "x  \n  y \n\n z\n ",
    "tabs": "\tif a:\n\t\treturn\tb",
    "carriage returns": "one\r\ntwo\r\n\r\nthree\rfour",
    "emoji": "ok \U0001f600\U0001f44d done",
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd \u2764\ufe0f",
    "flags": "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 \U0001f1fa",
    "combining marks": "cafe\u0301 a\u0308o\u0302 A\u030a \u0928\u093f\u0301",
    "composed and decomposed": "\u00e9 e\u0301 \u212b \u00c5 \ud55c \u1112\u1161\u11ab",
    "compatibility forms": "\ufb01ne \u2460 x\u00b2 \u00bd \u2167 \uff76\uff9e \u3392",
    "han": "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u4e2d\u6587\u5206\u8bcd \u6f22\u5b57",
    "kana and hangul": "\u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8 \uc548\ub155\ud558\uc138\uc694",
    "right to left": "\u0634\u0643\u0631\u0627\u064b \u05e9\u05dc\u05d5\u05dd\u200f abc \u202b\u0639\u202c",
    "digits of other scripts": "\u0661\u0662\u0663 \u0967\u0968\u0969 \u0e51\u0e52 \U0001d7ce\U0001d7cf \u4e00\u4e8c",
    "digits": "1 12 123 1234 12345 1,234.56 2024-05-06 -7",
    "full-width forms": "\uff28\uff45\uff4c\uff4c\uff4f\u3000\uff11\uff12\uff01 \uff5cx\uff5c",
    "spaces of Unicode": "a\u00a0b\u2009c\u3000d\u2028e\u2029f\u0085g\u1680h",
    "invisible characters": "a\u200bb\u00adc\u2060d\ufeffe",
    "control characters": "a\x00b\x01c\x1bd\x7fe\x1ff",
    "replacement characters": "a\ufffdb \ufffd\ufffd",
    "private characters": "\ue000 a\ue000b \ue001\uf8ff \U000f0000",
    "characters beyond": "\U0001d4d0\U00020000 \U0010fffd \u0c5c\ua7ce\U000323b0",
    "a long word": "Donaudampfschifffahrtsgesellschaft" * 8,
    "a letter often": "a" * 300,
    "code": 'def f(x: int) -> str:\n    """Doc."""\n    return f"{x!r}"  # <b>no</b>\n\n\nif x != "y":\n    f(1)',
    "markup": "<p class='a'>x &lt; y</p><!-- c -->\n```json\n{\"k\": [1, 2.5e-3, null]}\n```",
    "punctuation": "-- --- ... !!! ?? \u2026 \u201cq\u201d 'tis \u2019s ___ ~~~ | || |> <|",
    "contractions": "I'M we'LL THEY'D 'S 's 'T x's'",
    "upper and lower": "HTTPServer iPhone CamelCase mIxEd \u0130\u0131\u00df\u1e9e \u01c5",
    "marks of pieces": "\u2581a \u2581\u2581b \u0120c \u010ad <0x41> ##e @@f",
    "address": "https://example.org/a?b=c&d=%20#x user@host.org C:\\dir\\file",
}

NAMES = (
    "<s> </s> <unk> <pad> <eos> <bos> [CLS] [SEP] [MASK] [INST] [/INST] <|endoftext|> <|im_start|> <|im_end|> <mask>"
)


def texts_of(names: Sequence[str]) -> dict[str, str]:
    """Title -> text. names: of added tokens, whose names are in texts, too."""
    found = HARD | {"usual names": NAMES + "<s>a</s> <S> </S"}
    for name in names:
        found |= {
            f"{name} alone": name,
            f"{name} first": f"{name}Hello world",
            f"{name} among": f"a {name}b  {name}  c\n{name}\n{name}{name}d",
            f"{name} in part": f"{name[:-1]} {name[1:]} x{name.swapcase()} {name[0]} {name[1:]} {name}s",
        }
    return found


def conversations_of(names: Sequence[str]) -> dict[str, list[dict]]:
    """Title -> messages that alternate and end with an answer; the last ones have names of added tokens."""
    turns = [
        ("Hello there", "Hi. What is it?"),
        ("What is  2+2, na\u00efve friend?\n", "It is 4.\n\tSure.  "),
        ("\u4f60\u597d \U0001f468\u200d\U0001f469\u200d\U0001f467 cafe\u0301", "\u00c5 \ue000 \u0661 ok\ufffd"),
        (" x", "y "),
        ("```\ndef f():\n    pass\n```", "1,234.56\r\n\r\n<b>done</b>"),
    ]
    talks = {f"one turn, {number}": turns[number : number + 1] for number in range(len(turns))}
    talks |= {"two turns": turns[:2], "three turns": turns[1:4]}
    for name in names:
        talks[f"with {name}"] = [
            (f"say {name} now", f"{name} and a{name}b"),
            (f"{name[:-1]} {name}{name}", f"ok {name} ."),
        ]
    made = {title: _messages(talk) for title, talk in talks.items()}
    return made | {"with a system": [dict(role="system", content="Be brief. "), *made["two turns"]]}


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict]:
    return list(
        itertools.chain.from_iterable(
            (dict(role="user", content=asked), dict(role="assistant", content=said)) for asked, said in turns
        )
    )


TRAINED_ON = """The quick brown fox jumps over the lazy dog, and they'll say it's fine; I'm sure we've seen they'd go.
Hello there, hello world! What is it? The king and the queen said that this is the end of the text.
User asks the assistant: what is 2+2, naive friend? It is 4. The system is brief. Say hello to the model now.
def function(value):\n    return value + 1\n\n\nif name == main:\n    print(function(12345), 2024)
<p>some <s>old</s> price</p> <b>bold</b> <i>text</i> <a href="x">link</a> </s> <s> </p> | || |> <| -- ...
<class> <items> <words> <cells> <rows> <ps> <ds> <ks> <ns> <tools> <files> <lines> </i> </p> </td> </li>
caf\u00e9 na\u00efve \u00c5ngstr\u00f6m \u00e9l\u00e8ve stra\u00dfe \u00fcber \u00f1and\u00fa
\u4f60\u597d\u4e16\u754c\u4e2d\u6587 \u65e5\u672c\u8a9e
\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0634\u0643\u0631\u0627 \u05e9\u05dc\u05d5\u05dd
1 12 123 1234 12345 123456 1,234.56 3.14 100 200 2000
one two three four five six seven eight nine ten eleven twelve; system user assistant model tool message content
""" + "\n".join(
    f"{word} {word}s {word}ing un{word}ed  the{word} {word}," for word in "play work read write talk learn".split()
)
