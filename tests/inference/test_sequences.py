# SPDX-License-Identifier: Apache-2.0
"""Targets of encoder-decoders: greedy and beams are Hugging Face's on the same weights, beams that hold every target find
the best of all, a source's target does not depend on its neighbours.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron.entry import start
from megatron.errors import DataError, SettingsError
from megatron.inference import prompts
from megatron.inference.generation import generate_targets
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling, Search
from megatron.inference.sequence_engine import padded
from megatron.model.recipe import named_recipe
from megatron.model.t5.hf_names import matches
from megatron.tools import generate as tool
from tests.models.test_t5_oracle import CASES, SOURCE, TARGET, V, ours_of, theirs_of

LONGEST, START, END = (SOURCE, TARGET), 0, 1
SOURCES = [list(range(5, 45)), [7, 9, 11], list(range(90, 60, -1))]


def both(case="T5 1.1"):
    """Our model and theirs with the same weights."""
    kind, flags, more = CASES[case]
    theirs, (ours, facts) = theirs_of(kind, more), ours_of(flags)
    parameters, named = dict(ours.named_parameters()), dict(theirs.named_parameters())
    with torch.no_grad():
        for match in matches(kind, facts):
            parameters[match.ours].copy_(match.to_ours([named[name].detach() for name in match.theirs]))
    return ours.eval(), theirs


def their_targets(theirs, **how):
    rows, mask = padded(SOURCES, "cpu")
    made = theirs.generate(input_ids=rows.t(), attention_mask=mask.t(), max_new_tokens=12, use_cache=False, **how)
    found = []
    for row in made.tolist():
        row = row[1:]
        found.append(row[: row.index(END)] if END in row else row)
    return found


@pytest.mark.full
def test_greedy_and_beams_are_theirs():
    pytest.importorskip("transformers")
    ours, theirs = both()
    greedy = Sampling(tokens_to_generate=12, greedy=True)
    made = generate_targets(ours, SOURCES, greedy, longest=LONGEST, start=START, end=END)
    assert made == their_targets(theirs)
    wide = their_targets(theirs, num_beams=4, min_new_tokens=12, early_stopping="never")
    assert generate_targets(ours, SOURCES, greedy, Search(4), longest=LONGEST, start=START) == wide
    assert wide != made


def test_as_many_beams_as_targets_find_the_best():
    """Of all targets of up to three tokens, each scored by itself, without a cache."""
    ours, _ = ours_of(CASES["T5 1.1"][1])
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
        ours.output.weight[6:] = ours.output.weight[6:] * 0
        ours.eval()
        source = torch.tensor([[3], [8], [5]])
        best = {}
        vocabulary = range(V)
        chances = {}

        def after(*tokens):
            if tokens not in chances:
                row = torch.tensor([[START], *([token] for token in tokens)])
                chances[tokens] = ours.logits(source, row)[-1, 0].double().log_softmax(-1)
            return chances[tokens]

        for length in (1, 2):
            for tokens in itertools.product(vocabulary if length == 1 else range(6), repeat=length):
                if END in tokens:
                    continue
                score = sum(after(*tokens[:n])[token].item() for n, token in enumerate(tokens))
                if length == 1:
                    best[tokens] = (score + after(*tokens)[END].item()) / 2
                else:
                    best[tokens] = score / 2
        best[()] = after()[END].item()
    wanted = max(best, key=best.get)
    search = Search(V)
    got = generate_targets(
        ours, [[3, 8, 5]], Sampling(tokens_to_generate=2), search, longest=LONGEST, start=START, end=END
    )
    assert got == [list(wanted)]


def test_a_target_does_not_depend_on_its_neighbours():
    ours, _ = ours_of(CASES["T5 1.0"][1])
    with torch.no_grad():
        for number, parameter in enumerate(ours.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(drawn * 0.2 + (parameter.dim() == 1))
    ours.eval()
    greedy = Sampling(tokens_to_generate=9, greedy=True)
    together = generate_targets(ours, SOURCES, greedy, longest=LONGEST, end=END)
    alone = [generate_targets(ours, [source], greedy, longest=LONGEST, end=END)[0] for source in SOURCES]
    assert together == alone
    drawn = Sampling(tokens_to_generate=9, top_k=20, sampling_seed=3)
    first = generate_targets(ours, SOURCES[:1] * 2, drawn, longest=LONGEST, end=END)
    assert first[0] != first[1] and first == generate_targets(ours, SOURCES[:1] * 2, drawn, longest=LONGEST, end=END)


def test_the_tool_writes_what_a_small_model_has_learned(tmp_path, capsys):
    """Half a minute of training would make it right; that it answers, and says what it is given, is enough here."""
    flags = """--encoder-num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --decoder-seq-length 6
        --mock-data --vocab-size 40 --tokenizer-type NullTokenizer --device cpu --lr 1e-2 --micro-batch-size 4
        --train-iters 2 --eval-iters 0 --precision fp32"""
    start(f"{flags} --save {tmp_path}".split(), named_recipe("T5"))
    capsys.readouterr()
    line = ["--load", str(tmp_path), "--prompt", "5 6 7", "--tokens-to-generate", "4", "--device", "cpu", "--json"]
    more = ["--decoder-start-id", "0", "--decoder-end-id", "1", "--num-beams", "3"]
    tool.main([*line, *more])
    assert '"prompt": "5 6 7"' in capsys.readouterr().out
    model = load_model(str(tmp_path)).model
    with pytest.raises(DataError, match="source 1 has 9 tokens; the encoder can look at 8"):
        generate_targets(model, [[3] * 9], Sampling(), longest=(8, 6))
    for search, sampling, match in (
        (Search(0), Sampling(), "--num-beams 0"),
        (Search(2), Sampling(top_k=4), "--top-k 4 has no place"),
    ):
        with pytest.raises(SettingsError, match=match):
            generate_targets(model, [[3]], sampling, search, longest=(8, 6))


def test_beams_with_a_cache_are_beams_without():
    """The same search, each target's chances computed from its first token on."""
    ours, _ = ours_of(CASES["T5 1.1"][1])
    with torch.no_grad():
        for number, parameter in enumerate(ours.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(drawn * 0.25 + (parameter.dim() == 1))
    source, k, steps, found = torch.tensor(SOURCES[0]).unsqueeze(1), 3, 6, [(0.0, [])]
    ours.eval()
    with torch.no_grad():
        for _ in range(steps):
            grown = []
            for score, tokens in found:
                row = torch.tensor([START, *tokens]).unsqueeze(1)
                chances = ours.logits(source, row)[-1, 0].double().log_softmax(-1).tolist()
                grown += [(score + chance, [*tokens, token]) for token, chance in enumerate(chances)]
            found = sorted(grown, reverse=True)[:k]
    searched = generate_targets(ours, SOURCES[:1], Sampling(tokens_to_generate=steps), Search(k), longest=LONGEST)
    greedy = generate_targets(ours, SOURCES[:1], Sampling(tokens_to_generate=steps, greedy=True), longest=LONGEST)
    assert searched == [found[0][1]] and searched != greedy


@pytest.mark.parametrize("name", ["decoder_start_id", "decoder_end_id"])
def test_tokens_at_the_ends_of_targets_are_those_that_the_model_knows(name):
    plain, facts = SimpleNamespace(eod=2), SimpleNamespace(vocab_size=9)
    place = ("decoder_start_id", "decoder_end_id").index(name)
    for token in (0, 8):
        assert prompts.boundaries(plain, facts, Search(**{name: token}))[place] == token
    for token in (-1, 9):
        with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')} {token}: the model knows ids from 0 to 8"):
            prompts.boundaries(plain, facts, Search(**{name: token}))
    assert prompts.boundaries(plain, facts) == (0, 2)


def test_sentinels_in_a_prompt(vocabulary):
    """They stand between the ids of the texts around them, the spaces before them dropped, as masked words lose theirs."""
    from megatron.settings.schema import TokenizerSettings
    from megatron.tokenizer import build_tokenizer

    files = dict(vocab_file=str(vocabulary / "vocab.json"), merge_file=str(vocabulary / "merges.txt"))
    words = build_tokenizer(TokenizerSettings("GPT2BPETokenizer", **files, vocab_extra_ids=3), lambda text: None)
    first, second, third = words.sentinels
    assert len({first, second, third, *words.encode("the cat sat on")}) > 3
    found = prompts.source_of(words, "the <extra_id_0> sat <extra_id_2><extra_id_1> mat ", 1)
    assert found == [*words.encode("the"), first, *words.encode(" sat"), third, second, *words.encode(" mat ")]
    assert prompts.source_of(words, "<extra_id_1>", 1) == [second]
    assert prompts.no_sentinels(words, [found, [5], [6]])[0].startswith("2 prompts have no <extra_id_0>")
    assert prompts.no_sentinels(words, [found]) == []
    with pytest.raises(DataError, match="prompt 4 has <extra_id_3>; (.*)<extra_id_0> to <extra_id_2>"):
        prompts.source_of(words, "a <extra_id_3>", 4)
    plain = build_tokenizer(TokenizerSettings("GPT2BPETokenizer", **files), lambda text: None)
    assert prompts.no_sentinels(plain, [[5]]) == []
    with pytest.raises(DataError, match="of sentinels the vocabulary has none"):
        prompts.source_of(plain, "a <extra_id_0>", 1)
