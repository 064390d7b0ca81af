# SPDX-License-Identifier: Apache-2.0
"""Streamed text is the decoded text of all tokens, whatever they are, and ends before the first stop string."""

import io
import itertools
import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron.inference.text_stream import TextPiece, TextStream, overlap
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import build_tokenizer

TEXTS = [
    "the cat sat on the mat, and the dog sat on the hat. ",
    "caf\u00e9 na\u00efve \u0421\u043b\u043e\u0432\u043e \u4e2d\u6587\u5206\u8bcd \u65e5\u672c\u8a9e "
    "\U0001f600\U0001f468\u200d\U0001f469 x\ufffdy",
    "a  b\n\n c\td  'tis don't",
]


def byte_level(folder):
    model = HuggingFace(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(TEXTS * 5, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    model.model.save(str(folder))
    return TokenizerSettings(
        "GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
    )


def byte_fallback(folder):
    """As in Llama 2's tokenizer.json: spaces are marks, other characters than those of the vocabulary are bytes."""
    words = ["\u2581", "\u2581the", "the", "cat", "\u2581a", "a", "b", "t", "\u00e9", "\u4e2d"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256}
    vocab |= {word: 257 + number for number, word in enumerate(words)}
    model = HuggingFace(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(parts)
    model.save(str(folder / "tokenizer.json"))
    return TokenizerSettings("HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json"))


def sentence_piece(folder):
    sentencepiece, out = pytest.importorskip("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=out,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    (folder / "spm.model").write_bytes(out.getvalue())
    return TokenizerSettings("GPTSentencePieceTokenizer", tokenizer_model=str(folder / "spm.model"))


def word_piece(folder):
    words = ["[UNK]", "[PAD]", "the", "cat", "##s", "##at", ".", ",", "'", "n't", "do", "not", "\u4e2d", "##\u00e9"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    return TokenizerSettings("BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt"))


def added_tokens(folder):
    return byte_level(folder)


KINDS = [byte_level, byte_fallback, sentence_piece, word_piece, added_tokens]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def tokenizer(request, tmp_path_factory):
    made = build_tokenizer(request.param(tmp_path_factory.mktemp("words")))
    return made.with_tokens(["<extra_id_0>", "<extra_id_1>"]) if request.param is added_tokens else made


def streamed(tokenizer, tokens, stop=(), after=()) -> tuple[list[str], bool]:
    stream, pieces = TextStream(tokenizer, stop, after=after), []
    for token in tokens:
        piece = stream.feed(token)
        pieces.append(piece.text)
        if piece.stopped:
            return pieces, True
    piece = stream.finish()
    return [*pieces, piece.text], piece.stopped


def texts_of(tokenizer, number: int, seed: int):
    """Random tokens, and those of texts with some replaced."""
    draw = random.Random(seed)
    some = [token for text in TEXTS for token in tokenizer.encode(text)]
    for _ in range(number):
        length = draw.choice((1, 3, 20, 150))
        kind = draw.choice(("random", "text", "mixed"))
        start = draw.randrange(len(some))
        text = list(itertools.islice(itertools.cycle(some), start, start + length))
        share = dict(random=1.0, text=0.0, mixed=0.2)[kind]
        yield [draw.randrange(tokenizer.vocab_size) if draw.random() < share else token for token in text]


def test_pieces_are_the_text(tokenizer):
    for tokens in texts_of(tokenizer, 60, seed=1):
        pieces, _ = streamed(tokenizer, tokens)
        whole = tokenizer.decode(tokens)
        assert "".join(pieces) == whole
        # What is passed on after so many tokens is right whatever follows; so no character is half.
        assert all(whole.startswith("".join(pieces[:count])) for count in range(len(pieces)))


def test_a_continuation_has_the_space_before_its_first_word(tokenizer):
    draw, compared = random.Random(5), 0
    for tokens in texts_of(tokenizer, 60, seed=4):
        at = draw.randrange(len(tokens) + 1)
        before, whole = tokenizer.decode(tokens[:at]), tokenizer.decode(tokens)
        pieces, _ = streamed(tokenizer, tokens[at:], after=tokens[:at])
        if not before.strip() or before.endswith("\ufffd"):  # nothing to continue, or half a character
            assert "".join(pieces) == tokenizer.decode(tokens[at:])
        elif whole.startswith(before):
            compared += 1
            assert before + "".join(pieces) == whole
    assert compared > 15


def first_stop(text: str, stop) -> str:
    """The text before the stop string that is complete first, character by character."""
    for end in range(len(text) + 1):
        found = [word for word in stop if text[:end].endswith(word)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def test_a_text_ends_before_its_first_stop_string(tokenizer):
    draw, ended = random.Random(3), 0
    for tokens in texts_of(tokenizer, 60, seed=2):
        whole = tokenizer.decode(tokens)
        stop = [draw.choice(("zzz", "ab", "\u4e2d\u6587x", "t t")), "q"]
        for _ in range(draw.randrange(3)):
            at = draw.randrange(len(whole) or 1)
            stop += [word for word in [whole[at : at + draw.choice((1, 2, 5, 9))]] if word]
        pieces, stopped = streamed(tokenizer, tokens, stop)
        wanted = first_stop(whole, stop)
        assert "".join(pieces) == wanted and stopped == (wanted != whole), (whole, stop)
        ended += stopped
    assert 10 < ended < 55


def test_text_comes_as_early_as_it_can(tmp_path):
    """One character per token for ordinary text; a character of several tokens with its last one."""
    words = build_tokenizer(byte_level(tmp_path))
    ids = {bytes([byte]): words.encode(chr(byte))[0] for byte in range(33, 127)}
    pieces, _ = streamed(words, [ids[b"a"], ids[b"b"], ids[b"c"]])
    assert pieces == ["a", "b", "c", ""]
    snake = words.encode("\U0001f40d")
    assert len(snake) == 3 and streamed(words, [ids[b"a"], *snake])[0] == ["a", "", "", "\U0001f40d", ""]
    stream = TextStream(words, ["xyz"])
    assert [stream.feed(ids[byte]) for byte in (b"a", b"x", b"y", b"b", b"x")] == [
        *(TextPiece("a"), TextPiece(""), TextPiece(""), TextPiece("xyb"), TextPiece(""))
    ]
    assert stream.finish() == TextPiece("x")


@pytest.mark.parametrize("pieces", [["abcde"], list("abcde"), ["ab", "cde"], ["abc", "de"]])
def test_the_stop_string_that_is_complete_first_counts(pieces):
    """Not the one that begins first: then a text would depend on how tokens divide it."""

    class Words:
        decode = staticmethod(lambda ids: "".join(pieces[id] for id in ids))

    for stop, wanted in ((["abcd", "bc"], "a"), (["bcd", "cd"], "a"), (["d", "abcde"], "abc")):
        found, stopped = streamed(Words, range(len(pieces)), stop)
        assert "".join(found) == wanted and stopped


class SingleBytes:
    """A tokenizer whose tokens are single bytes. each: bytes that are no character become a U+FFFD each, not one in all."""

    def __init__(self, each: bool):
        self.each = each

    def decode(self, ids):
        if not self.each:
            return bytes(ids).decode("utf-8", "replace")
        text, rest = "", bytes(ids)
        while rest:
            try:
                return text + rest.decode()
            except UnicodeDecodeError as error:
                text += rest[: error.start].decode() + "\ufffd" * (error.end - error.start)
                rest = rest[error.end :]
        return text


@pytest.mark.parametrize("each", [False, True])
def test_characters_of_one_to_four_bytes_come_whole_and_at_once(each):
    """And `position` counts those that are whole."""
    text = "a\xe9\u4e2d\U0001f40d!\U0001f600\xe9\u4e2d" * 9
    stream, found = TextStream(SingleBytes(each)), []
    for character in text:
        *before, last = character.encode()
        for token in before:
            assert stream.feed(token).text == "" and stream.position == len(found)
        found.append(stream.feed(last).text)
        assert found[-1] == character and stream.position == len(found)
    assert stream.finish().text == ""


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("others", [0, 30])
def test_bytes_that_become_no_character_wait_for_three_others(each, others):
    """So many may be the beginning of one that has four bytes."""
    stream, wanted = TextStream(SingleBytes(each)), "a" * others + "\ufffd" * 100
    found = ""
    for count, token in enumerate([97] * others + [0xFF] * 100, 1):
        found += stream.feed(token).text
        assert found == wanted[: max(min(count, others), count - 3)]
    assert found + stream.finish().text == wanted


def test_the_overlap_of_a_text_with_a_word_is_a_part_of_the_word():
    words = ["".join(word) for size in range(1, 5) for word in itertools.product("ab", repeat=size)]
    for text, word in itertools.product(["", *words], words):
        ends = [size for size in range(len(word)) if text.endswith(word[:size])]
        assert overlap(text, word) == max(ends)


@pytest.mark.parametrize("least", range(5))
def test_the_first_token_after_the_least_may_end_a_text(least):
    """Of "xbbbb" with the stop string "b": at the second token, unless more are wanted."""
    letters = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    stream, said = TextStream(letters, ["b"], least), []
    for letter in "xbbbb":
        said.append(stream.feed(ord(letter)))
        if stream.stopped:
            break
    fed = max(least + 1, 2)
    assert stream.fed == fed and "".join(piece.text for piece in said) == "xbbbb"[: fed - 1]


def test_long_texts_are_not_decoded_again_and_again():
    class Words:
        def __init__(self):
            self.decoded = 0

        def decode(self, ids):
            self.decoded += len(ids)
            return "".join(f"{id}," for id in ids)

    words = Words()
    pieces, _ = streamed(words, range(3000))
    assert "".join(pieces) == "".join(f"{id}," for id in range(3000)) and words.decoded < 50 * 3000
