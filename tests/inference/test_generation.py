# SPDX-License-Identifier: Apache-2.0
"""Generation: the cache changes nothing, prompts do not disturb each other, and the choices are the right ones."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from megatron.errors import CheckpointError, DataError, SettingsError, StorageError, UsageError
from megatron.inference.beams import BeamSearch, beam_search
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling, Search, cut_off
from megatron.inference.scoring import ALONE
from megatron.tools import checkpoint, evaluate
from megatron.tools import generate as tool
from tests.inference.test_convert import GPT2, save, weights_of

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
LAYOUTS = [
    dict(),
    dict(
        position_embedding_type="rope",
        swiglu=True,
        normalization="RMSNorm",
        num_query_groups=2,
        group_query_attention=True,
        untie_embeddings_and_output_weights=True,
        disable_bias_linear=True,
    ),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["gpt2", "llama"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12, greedy=True),
        Sampling(12, temperature=0.8, top_k=40, top_p=0.95),
        Sampling(12, repetition_penalty=1.5, temperature=1.3),
    ],
    ids=["greedy", "nucleus", "penalty"],
)
def test_cache_and_neighbours_change_nothing(small_gpt, layout, sampling):
    model = small_gpt(**layout)
    together = generate(model, PROMPTS, sampling, longest=32)
    assert together == generate(model, PROMPTS, sampling, longest=32, use_cache=False)
    assert [len(answer) for answer in together] == [12, 12, 12]
    assert generate(model, PROMPTS[:1], sampling, longest=32) == together[:1]
    assert len({tuple(answer) for answer in together}) == 3


@pytest.mark.parametrize("asked", [dict(greedy=True), dict(temperature=0.0), dict(temperature=0.0, top_k=3, top_p=0.5)])
def test_greedy_follows_the_largest_logit(asked, small_gpt):
    model = small_gpt()
    Sampling(6, **asked).check()
    (answer,) = generate(model, PROMPTS[:1], Sampling(6, **asked), longest=32)
    text = list(PROMPTS[0])
    for token in answer:
        assert token == model.logits(torch.tensor(text).unsqueeze(1))[-1, 0].argmax().item()
        text.append(token)


def test_seeds(small_gpt):
    model, sampling = small_gpt(scale=3.0), Sampling(10, sampling_seed=1)
    same = generate(model, [PROMPTS[0]] * 2, sampling, longest=32)
    assert same == generate(model, [PROMPTS[0]] * 2, sampling, longest=32)
    assert same[0] != same[1]  # samples of one prompt differ
    assert same != generate(model, [PROMPTS[0]] * 2, Sampling(10, sampling_seed=2), longest=32)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["gpt2", "llama"])
@pytest.mark.parametrize("length_penalty, least", [(1.0, 0), (0.0, 0), (2.0, 0), (0.0, 1), (0.0, 2)])
def test_enough_beams_find_the_best_of_all_texts(small_gpt, layout, length_penalty, least):
    """Of all texts of `least` to three tokens, each scored whole by itself; while it may not end, others share the
    chances of its end. With a cache and without, and for two prompts.
    """
    v, end, steps = 6, 1, 3
    model, search = small_gpt(vocab_size=v, scale=3.0, **layout), Search(v * v, length_penalty)
    prompts, best = [[3, 1, 4, 1, 5], [0, 2]], []
    for prompt in prompts:
        scores = {}
        for tokens in itertools.product(range(v), repeat=steps):
            length = tokens.index(end) + 1 if end in tokens else steps
            if end in tokens[:least]:
                continue
            text = torch.tensor([*prompt, *tokens[:length]]).unsqueeze(1)
            logits = model.logits(text)[len(prompt) - 1 : -1, 0].double()
            logits[:least, end] = float("-inf")
            chances = logits.log_softmax(-1)
            score = chances.gather(1, text[len(prompt) :]).sum().item() / length**length_penalty
            scores[tokens[: length - (end in tokens)]] = score
        best.append(list(max(scores, key=scores.get)))
    for cached in (True, False):
        sampling = Sampling(steps, min_tokens_to_generate=least)
        assert generate(model, prompts, sampling, search, longest=32, end=end, use_cache=cached) == best


@pytest.mark.parametrize("beams, wanted", [(2, []), (3, [1] * 20)])
def test_beams_end_when_as_many_texts_have_ended_that_are_better_so_far(beams, wanted):
    """The first tokens of the best text are unlikely, and all behind them likely: two other texts have ended by then."""

    def next_logits(tokens):
        after = {0: [0.5, 0.4, 0.1], 1: [0.6, 0.399, 0.001]}.get(len(tokens) - 1, [0.0005, 0.999, 0.0005])
        return torch.tensor(after).log().expand(tokens.shape[1], 3)

    first, more = torch.zeros((1, beams), dtype=torch.int64), dict(vocab_size=3, cache=None, end=0, counted=1, pp=ALONE)
    assert beam_search(next_logits, first, Search(beams), Sampling(20), 20, **more)[0] == wanted


def test_beams_end_where_an_unfinished_text_is_as_good_as_the_finished_ones():
    """As Hugging Face's `is_done`: the worst finished one has to be at least as good. The numbers are exact."""
    search = BeamSearch(Search(2), 9, frozenset({0}), 9)
    assert search.advance([[(0, -1.0), (5, -1.0), (6, -4.0)]]) == [(0, 5), (0, 6)]
    # (5, 7) would become better with a further token
    assert search.advance([[(0, -1.0), (7, -1.0)], [(8, -1.0)]]) == []
    assert search.found == [(-1.0, ()), (-1.0, (5,))]


def test_beams_end_with_the_model_and_draw_nothing(small_gpt):
    model = small_gpt()
    found = generate(model, PROMPTS, Sampling(12), Search(3), longest=10)
    assert [len(answer) for answer in found] == [5, 8, 3]
    assert generate(model, PROMPTS, Sampling(12, repetition_penalty=3.0), Search(3), longest=10) != found
    with pytest.raises(SettingsError, match="--top-k 4 has no place"):
        generate(model, PROMPTS, Sampling(12, top_k=4), Search(3), longest=10)
    with pytest.raises(SettingsError, match="--length-penalty 2 is of beam search"):
        generate(model, PROMPTS, Sampling(12), Search(length_penalty=2.0), longest=10)


@pytest.mark.parametrize("length", [15, 16, 31])
def test_beams_go_on_where_a_block_of_the_cache_ends(small_gpt, length):
    """Prompts of one and of two blocks, and texts that fill the next one."""
    model, prompt = small_gpt(scale=4.0, seq_length=64), [(7 * number) % 500 for number in range(length)]
    once, again = (
        generate(model, [prompt], Sampling(19), Search(3), longest=64, use_cache=use_cache, best=3)
        for use_cache in (True, False)
    )
    assert once == again and len(set(map(tuple, once))) == 3


@pytest.mark.parametrize("beams", [1, 3])
def test_no_text_ends_too_early(small_gpt, beams):
    """What the model likes best is what ends its texts."""
    model, sampling = small_gpt(), Sampling(12, greedy=True)
    search = Search(beams, length_penalty=0.0) if beams > 1 else Search()
    whole = generate(model, PROMPTS, sampling, search, longest=32)
    end = whole[0][2]
    short = generate(model, PROMPTS, sampling, search, longest=32, end=end)
    later = replace(sampling, min_tokens_to_generate=9)
    found = generate(model, PROMPTS, later, search, longest=32, end=end)
    assert len(short[0]) < 9 <= min(map(len, found)) and not any(end in answer for answer in found)
    with pytest.raises(SettingsError, match="--min-tokens-to-generate 13 is more than --tokens-to-generate 12"):
        replace(sampling, min_tokens_to_generate=13).check()


@pytest.mark.full
def test_beams_are_hugging_faces(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    sharp = lambda model: {name: 2 * weight for name, weight in weights_of(model, seed=1).items()}
    monkeypatch.setattr("tests.inference.test_convert.weights_of", sharp)
    save(tmp_path / "ours", GPT2 | dict(untie_embeddings_and_output_weights=True))
    checkpoint.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--dtype", "fp32"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    ours, greedy, differ = load_model(str(tmp_path / "ours")), Sampling(9, greedy=True), 0
    early = 0  # texts that end before they have to
    for beams, prompt in itertools.product((2, 5), PROMPTS):
        more = dict(num_beams=beams, max_new_tokens=9, min_new_tokens=9, do_sample=False, early_stopping="never")
        wanted = theirs.generate(torch.tensor([prompt]), pad_token_id=0, **more)[0, len(prompt) :].tolist()
        assert generate(ours.model, [prompt], greedy, Search(beams), longest=ours.longest) == [wanted]
        [plain] = generate(ours.model, [prompt], greedy, longest=ours.longest)
        more = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False)
        assert plain == theirs.generate(torch.tensor([prompt]), pad_token_id=0, **more)[0, len(prompt) :].tolist()
        differ += plain != wanted
        for end, penalty in itertools.product({plain[1], plain[4]}, (1.0, 2.0, -0.5)):
            more = dict(num_beams=beams, max_new_tokens=9, do_sample=False, length_penalty=penalty, eos_token_id=end)
            made = theirs.generate(torch.tensor([prompt]), pad_token_id=0, **more)[0, len(prompt) :].tolist()
            made = made[: made.index(end)] if end in made else made
            search = Search(beams, penalty)
            assert generate(ours.model, [prompt], greedy, search, longest=ours.longest, end=end) == [made]
            early += len(made) < 9
    assert differ >= 4 and early >= 10


def test_text_ends_at_its_end(small_gpt):
    model = small_gpt()
    whole = generate(model, PROMPTS, Sampling(12, greedy=True), longest=32)
    end = whole[0][4]
    heard = []
    cut = generate(model, PROMPTS, Sampling(12, greedy=True), longest=32, end=end, on_token=heard.append)
    for long, short in zip(whole, cut, strict=True):
        assert short == (long[: long.index(end)] if end in long else long)
    assert heard[0] == [answer[0] if answer else -1 for answer in cut]


def test_text_ends_where_the_model_ends(small_gpt):
    model = small_gpt()
    for use_cache in (True, False):
        answers = generate(model, PROMPTS, Sampling(100, greedy=True), longest=32, use_cache=use_cache)
        assert [len(a) + len(p) for a, p in zip(answers, PROMPTS, strict=True)] == [32, 32, 32]
    with pytest.raises(DataError, match="prompt 2 has 32 tokens; the model can look at 32"):
        generate(model, [[1], [1] * 32], Sampling(), longest=32)
    with pytest.raises(DataError, match="prompt 1 has 0 tokens"):
        generate(model, [[]], Sampling(), longest=32)


def test_wrong_settings_are_told_together():
    with pytest.raises(SettingsError, match="(?s)--tokens-to-generate 0.*--temperature -0.1.*--top-p 2"):
        tool.main(["--load", "x", "--prompt", "y", "--temperature", "-.1", "--top-p", "2", "--tokens-to-generate", "0"])


@pytest.mark.sampled(2)
def test_the_tool(checkpoint, capsys, tmp_path, monkeypatch):
    line = ["--load", str(checkpoint), "--tokens-to-generate", "5", "--device", "cpu", "--precision", "fp32"]
    tool.main([*line, "--prompt", "the cat", "a dog", "--greedy"])
    out, err = capsys.readouterr()
    assert out.startswith("the cat") and "\n" + "-" * 40 + "\na dog" in out
    assert "10 tokens in" in err and "iter_0000007" in err
    assert err.count("note: 2 of 2 texts were cut at --tokens-to-generate 5\n") == 1
    (tmp_path / "prompts.txt").write_text("the cat\n\na\u2028dog\n", encoding="utf-8")
    tool.main([*line, "--prompt-file", str(tmp_path / "prompts.txt"), "--num-samples", "2", "--json"])
    records = [json.loads(answer) for answer in capsys.readouterr().out.strip().split("\n")]
    assert [record["prompt"] for record in records] == ["the cat", "the cat", "a\u2028dog", "a\u2028dog"]
    assert all(len(record["tokens"]) == 5 for record in records)
    assert records[0]["tokens"] != records[1]["tokens"]
    tool.main([*line, "--prompt", "the cat", "--num-beams", "3", "--json"])
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 5
    file = tmp_path / "new" / "texts"
    for flag in ("--output", "--sample-output-file", "--genfile"):
        tool.main([*line, "--prompt", "the cat", "a dog", "--greedy", flag, str(file)])
        written, (said, err) = file.read_text(encoding="utf-8"), capsys.readouterr()
        assert written == out and said == "" and (f"note: replaces {file}" in err) == (flag != "--output")
    for tool_of, more in ((tool, ["--prompt", "the cat"]), (evaluate, ["--data-path", "prefix"])):
        monkeypatch.setattr(tool_of, "on_ranks", lambda *work: pytest.fail("the work begins before the check"))
        with pytest.raises(StorageError, match=r"(?s)texts/below.*is a file, not a folder"):
            tool_of.main(["--load", str(checkpoint), *more, "--output", str(file / "below")])
        with pytest.raises(StorageError, match="/proc/nowhere/texts: cannot be written"):
            tool_of.main(["--load", str(checkpoint), *more, "--output", "/proc/nowhere/texts"])


def test_the_flags_of_paddlenlp(checkpoint, capsys):
    """A strategy names the one of top-k and top-p that counts, as in its GPTForGeneration."""
    line = f"--load {checkpoint} --device cpu --prompt cat dog --num-samples 4 --json"

    def texts(more: str) -> tuple[list, str]:
        tool.main([*line.split(), *more.split()])
        out, err = capsys.readouterr()
        return [json.loads(answer)["tokens"] for answer in out.splitlines()], err

    theirs = "--max_dec_len 6 --topk 3 --topp 0.5 --temperature 1.5 --decoding_strategy"
    ours, found = "--tokens-to-generate 6 --temperature 1.5", {}
    for strategy, flags, unused in (
        ("topk_sampling", "--top-k 3", ["--top-p 0.5"]),
        ("topp_sampling", "--top-p 0.5", ["--top-k 3"]),
        ("sampling", "", ["--top-k 3", "--top-p 0.5"]),
    ):
        found[strategy], said = texts(f"{theirs} {strategy} --save_inference_model_then_exist false")
        assert found[strategy] == texts(f"{ours} {flags}")[0]
        told = [f"note: {flag} has no effect: --decoding-strategy {strategy}" for flag in unused]
        assert [one for one in said.splitlines() if "no effect" in one] == told
    assert len({str(one) for one in found.values()}) == 3 and max(map(len, found["sampling"])) == 6
    with pytest.raises(SettingsError, match="--decoding-strategy topk_sampling needs --top-k"):
        texts("--decoding_strategy topk_sampling --topp 0.9")


def test_texts_that_a_limit_has_cut_are_counted(small_gpt):
    """Against what longer limits let the same model write: a text that ended by itself is the same there."""
    model, end = small_gpt(), 7
    rooms = [32 - len(prompt) for prompt in PROMPTS]

    def answers(limit):
        return generate(model, PROMPTS, Sampling(limit, temperature=3.0), longest=32, end=end)

    for limit in (3, 20, 40):
        asked, own, longer = Sampling(limit, temperature=3.0), answers(limit), answers(limit + 1)
        more = sum(len(long) > len(short) for long, short in zip(longer, own, strict=True))
        full = sum(len(answer) == room < limit for answer, room in zip(own, rooms, strict=True))
        said = cut_off(rooms, own, asked)
        counts = [number for number, flag in ((more, "--tokens-to-generate"), (full, "last position")) if number]
        assert [int(line.split()[0]) for line in said] == counts and len(said) <= 2
    assert cut_off([9, 2], [[1] * 5, [1] * 2], Sampling(5)) == [
        "1 of 2 texts was cut at --tokens-to-generate 5",
        "1 of 2 texts was cut at the model's last position",
    ]
    assert cut_off([9, 9], [[1] * 4, []], Sampling(5)) == []


def test_mistakes_with_the_tool(checkpoint, tmp_path, vocabulary):
    load = ["--load", str(checkpoint)]
    with pytest.raises(UsageError, match="no text to continue"):
        tool.main(load)
    with pytest.raises(UsageError, match="both given"):
        tool.main([*load, "--prompt", "a", "--prompt-file", "b"])
    with pytest.raises(DataError, match="no such file"):
        tool.main([*load, "--prompt-file", str(tmp_path / "missing")])
    with pytest.raises(SettingsError, match="--decoder-end-id 1 is of encoder-decoders, and .* holds none"):
        tool.main([*load, "--prompt", "a", "--decoder-end-id", "1"])
    with pytest.raises(CheckpointError, match="no checkpoint"):
        tool.main(["--load", str(tmp_path), "--prompt", "a"])
    with pytest.raises(CheckpointError, match="iteration 8"):
        tool.main([*load, "--prompt", "a", "--ckpt-step", "8"])
    with pytest.raises(DataError, match="--vocab-file .*moved.json: no such file"):
        tool.main([*load, "--prompt", "a", "--vocab-file", str(tmp_path / "moved.json")])
    with pytest.raises(DataError, match="33 tokens; the model can look at 32"):
        tool.main([*load, "--prompt", "!" * 33])


@pytest.mark.parametrize(
    "flags, idle",
    [
        ("--greedy --temperature 0.5 --top-p 0.3 --seed 9", ["--temperature 0.5", "--top-p 0.3", "--seed 9"]),
        ("--temperature 0 --top-k 5 --seed 3", ["--top-k 5", "--seed 3"]),
        ("--top-k 1 --top-p 0.9 --temperature 2.5", ["--top-p 0.9", "--temperature 2.5"]),
        ("--greedy --temperature 1.0 --top-p 0 --top-k 0", []),
        ("--top-k 5 --top-p 0.9 --temperature 2 --seed 3", []),
        ("--top-k 5000", []),
    ],
)
def test_settings_of_draws_that_draw_nothing_are_named(flags, idle, checkpoint, capsys):
    tool.main(["--load", str(checkpoint), "--prompt", "a", "--tokens-to-generate", "2", *flags.split()])
    said = capsys.readouterr().err
    assert [
        line.split(" has no effect without sampling")[0] for line in said.splitlines() if "has no effect" in line
    ] == [f"note: {words}" for words in idle]
    assert ("--top-k 5000 is more than the" in said) == ("5000" in flags)
