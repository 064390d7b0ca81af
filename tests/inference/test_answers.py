# SPDX-License-Identifier: Apache-2.0
"""Answers to texts: the command and `Loaded.generate`, with stop strings, streams, log-probabilities, seeds and samples."""

import io
import json
from dataclasses import replace

import pytest
import torch

from megatron.errors import DataError, SettingsError, StorageError
from megatron.inference.answers import Asked, answered, answers_to, continued, ignored
from megatron.inference.engine import Engine
from megatron.inference.load import load_model
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling, Search
from megatron.tools import generate as tool
from tests.tokenizer.plain import PlainTokenizer

PROMPTS = ["the cat", "a dog"]


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_model(str(checkpoint), precision="fp32")


@pytest.fixture
def run(checkpoint, capsys):
    def call(flags: str, *more: str, prompts=PROMPTS) -> tuple[str, str]:
        line = f"--load {checkpoint} --device cpu --precision fp32 {flags}".split()
        tool.main([*line, *more, "--prompt", *prompts])
        return capsys.readouterr()

    return call


def records(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("asked, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float32)])
def test_weights_of_half_precision_are_widened_on_a_cpu(checkpoint, asked, dtype):
    """Torch has no fast products of fp16 there, and none of some ops."""
    model = load_model(str(checkpoint), precision=asked).model
    assert {weight.dtype for weight in model.parameters()} == {dtype}


WAYS = {
    "greedy": dict(greedy=True),
    "drawn": dict(top_k=20, temperature=1.5, sampling_seed=3),
    "beams": dict(num_beams=3),
    "no cache": dict(greedy=True, use_cache=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_ends_before_its_stop_string(loaded, way):
    """Wherever the string is in the whole text, and however tokens divide it."""
    how = dict(tokens_to_generate=14, **WAYS[way])
    [whole] = answers_to(loaded, PROMPTS[:1], **how)
    assert whole.finish == "length" and len(whole.tokens) == 14
    for at, length in ((0, 1), (3, 2), (5, 4), (len(whole.text) - 2, 2)):
        stop = whole.text[at : at + length]
        [found] = answers_to(loaded, PROMPTS[:1], **how, stop=["never there", stop])
        assert found.text == whole.text[: whole.text.index(stop)] and found.finish == "stop"
        assert found.tokens == whole.tokens[: len(found.tokens)]
        if "\ufffd" not in stop:
            assert stop in loaded.tokenizer.decode(found.tokens)
            assert stop not in loaded.tokenizer.decode(found.tokens[:-1])
    [later] = answers_to(loaded, PROMPTS[:1], **how, stop=[whole.text[:1]], min_tokens_to_generate=2)
    assert later.text or whole.text[0] == "\ufffd"  # of a character that is not finished


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_and_its_continuation_are_one_text(loaded, way):
    """Where a tokenizer writes spaces between words: the first new word has one before it."""

    sizes = dict(vocab_size=loaded.tokenizer.vocab_size, eod=loaded.tokenizer.eod)
    numbers = PlainTokenizer(
        lambda text: [int(word) for word in text.split()], lambda ids: " ".join(map(str, ids)), **sizes
    )
    how = dict(WAYS[way])
    search, use_cache = Search(num_beams=how.pop("num_beams", 1)), how.pop("use_cache", True)
    asked = Asked(["3 1 4", "15"], Sampling(5, **how), search, use_cache=use_cache)
    found = answered(loaded, numbers, asked).answers
    for prompt, answer in zip(asked.prompts, found, strict=True):
        assert answer.tokens and prompt + answer.text == numbers.decode([*numbers.encode(prompt), *answer.tokens])


def test_a_text_that_has_ended_is_not_continued(loaded):
    engine, words = Engine(loaded.model, longest=loaded.longest), loaded.tokenizer
    requests = [Request(tuple(words.encode(prompt)), Sampling(20, greedy=True)) for prompt in PROMPTS]
    [whole, _] = continued(engine, requests, words, ignored)
    before = engine.stats().generated_tokens
    stop = replace(requests[0], sampling=replace(requests[0].sampling, stop=[words.decode(whole.tokens[:2])[-1:]]))
    [short] = continued(engine, [stop], words, ignored)
    assert short.finish == "stop" and len(short.tokens) <= 3
    assert engine.stats().generated_tokens - before <= len(short.tokens) + 1 and not engine.busy
    engine.close()  # copies of weights would stay


def test_an_engine_is_closed_also_where_the_reader_of_a_stream_fails(loaded, monkeypatch):
    """Other ranks would wait for ever, and copies of weights stay."""
    closed, close = [], Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine) or close(engine))

    def fails(*answer) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        answered(loaded, loaded.tokenizer, Asked(PROMPTS, Sampling(4, greedy=True)), on_text=fails)
    assert len(closed) == 1 and not closed[0].stats().running


def test_tokens_that_end_texts(loaded):
    how = dict(tokens_to_generate=14, greedy=True)
    [whole] = answers_to(loaded, PROMPTS[:1], **how)
    ends = whole.tokens[6]
    [found] = answers_to(loaded, PROMPTS[:1], **how, stop_token_ids=[ends])
    assert (found.tokens, found.finish) == (whole.tokens[: whole.tokens.index(ends)], "stop")
    [found] = answers_to(loaded, PROMPTS[:1], **how, forced_bos_token_id=5, forced_eos_token_id=6)
    assert (found.tokens[0], found.tokens[-1], len(found.tokens)) == (5, 6, 14)
    eod = loaded.tokenizer.eod
    likely = dict(**how, logit_bias=[f"{eod}:1000"])
    assert [one.tokens for one in answers_to(loaded, PROMPTS[:1], **likely)] == [[]]
    assert answers_to(loaded, PROMPTS[:1], **likely, ignore_eos=True)[0].tokens == [eod] * 14


def test_the_end_that_is_asked_for_counts_before_the_models(loaded):
    """As of conversations, whose turns end with another token."""
    ask = lambda **more: answered(loaded, loaded.tokenizer, Asked(PROMPTS[:1], **more)).answers[0]
    whole = ask(sampling=Sampling(9, greedy=True))
    turn, eod = whole.tokens[4], loaded.tokenizer.eod
    found = ask(sampling=Sampling(9, greedy=True), end=turn)
    assert (found.tokens, found.finish) == (whole.tokens[: whole.tokens.index(turn)], "stop")
    likely = ask(sampling=Sampling(9, greedy=True, logit_bias=[f"{eod}:1000"]), end=turn)
    assert (likely.tokens, likely.finish) == ([eod] * 9, "length")


def test_ends_that_the_model_does_not_have_are_left_out(checkpoint):
    """A file of a model whose embedding has more rows."""
    path, rows = checkpoint / "generation_config.json", load_model(str(checkpoint)).vocab_size
    try:
        path.write_text(json.dumps(dict(eos_token_id=[rows - 1, rows, rows + 1])))
        assert load_model(str(checkpoint)).ends == (rows - 1,)
    finally:
        path.unlink()


def test_log_probabilities_are_those_of_the_model(loaded, run):
    """Its own, before temperature and filters: log_softmax of a plain forward pass over the whole text."""
    out, _ = run("--tokens-to-generate 5 --temperature 2 --top-k 9 --logprobs 3 --prompt-logprobs --json")
    for record in records(out):
        prompt = loaded.tokenizer.encode(record["prompt"])
        text = torch.tensor([*prompt, *record["tokens"]]).unsqueeze(1)
        with torch.no_grad():
            wanted = loaded.model.logits(text)[:, 0].double().log_softmax(-1)
        scores = record["prompt_logprobs"] + record["logprobs"]
        assert [score["token"] for score in scores] == text.flatten().tolist() and scores[0]["logprob"] is None
        for place, score in enumerate(scores[1:]):
            assert score["logprob"] == pytest.approx(wanted[place, score["token"]].item(), abs=1e-5)
            best = wanted[place].topk(3)
            assert [one["token"] for one in score["top"]] == best.indices.tolist()
            assert [one["logprob"] for one in score["top"]] == pytest.approx(best.values.tolist(), abs=1e-5)
            assert score["text"] == loaded.tokenizer.decode([score["token"]])
    out, _ = run("--tokens-to-generate 2 --greedy --return-log-probs --json")
    assert all(set(score) == {"token", "text", "logprob"} for record in records(out) for score in record["logprobs"])
    out, _ = run("--tokens-to-generate 2 --greedy --top-n-logprobs 2")
    lines = out.splitlines()
    assert lines[0].startswith("the cat") and [line.count('"') for line in lines[1:3]] == [6, 6]


@pytest.mark.parametrize("asked, count", [(None, None), (0, 0), (2, 2)])
def test_each_new_token_has_its_score_if_scores_are_asked_for(asked, count, loaded):
    """With no likelier ones beside it, too."""
    for answer in answers_to(loaded, PROMPTS, tokens_to_generate=3, greedy=True, logprobs=asked):
        assert [score.token for score in answer.scores] == ([] if count is None else answer.tokens)
        assert all(score.logprob < 0 and len(score.top) == count for score in answer.scores)


def test_texts_that_a_stop_string_ended_were_not_cut(run, loaded):
    [stop, _] = loaded.generate(PROMPTS, tokens_to_generate=8, greedy=True)
    for way in ("--greedy", "--greedy --no-use-cache", "--num-beams 2"):
        out, err = run(f"--tokens-to-generate 8 --json {way}", "--stop", stop)
        cut = sum(record["finish"] == "length" for record in records(out))
        assert (f"{cut} of 2 text" in err) == (cut > 0) and (way == "--num-beams 2" or cut == 1)


@pytest.mark.parametrize("flags", ["--greedy", "--num-samples 3", "--num-beams 2", "--json", "--logprobs 1"])
def test_a_stream_prints_what_is_printed_at_the_end(flags, run, monkeypatch):
    whole, _ = run(f"--tokens-to-generate 8 --stop og {flags}")
    written, flushes = io.StringIO(), []
    monkeypatch.setattr(written, "flush", lambda: flushes.append(len(written.getvalue())), raising=False)
    monkeypatch.setattr("sys.stdout", written)
    run(f"--tokens-to-generate 8 --stop og --stream {flags}")
    assert written.getvalue() == whole
    if flags == "--greedy":
        assert len(flushes) > 8 and flushes[1] < len(whole) / 3  # as the text grows, not at its end


def test_a_prompt_with_its_own_seed_does_not_depend_on_the_others(run, loaded):
    line = "--tokens-to-generate 6 --temperature 2 --json --num-samples 2 --prompt-seeds"
    both = records(run(f"{line} 5 6")[0])
    alone = records(run(f"{line} 6", prompts=PROMPTS[1:])[0])
    assert both[2:] == alone and both[0]["tokens"] != both[1]["tokens"]
    swapped = records(run(f"{line} 6 5", prompts=PROMPTS[::-1])[0])
    assert swapped == [*both[2:], *both[:2]]
    how = dict(tokens_to_generate=6, temperature=2.0, samples=2, seeds=[5, 6])
    assert loaded.generate(PROMPTS, **how) == [record["text"] for record in both]
    assert loaded.generate(PROMPTS, **how, use_cache=False) == loaded.generate(PROMPTS, **how)


def test_beam_search_gives_its_best_texts(loaded, run):
    line = "--tokens-to-generate 6 --num-beams 4 --json"
    three = records(run(f"{line} --num-return-sequences 3")[0])
    best = records(run(line)[0])
    assert [three[0], three[3]] == best
    for texts in (three[:3], three[3:]):
        scores = []
        for record in texts:
            prompt = loaded.tokenizer.encode(record["prompt"])
            text = torch.tensor([*prompt, *record["tokens"]]).unsqueeze(1)
            with torch.no_grad():
                chances = loaded.model.logits(text)[len(prompt) - 1 : -1, 0].double().log_softmax(-1)
            scores.append(chances.gather(1, text[len(prompt) :]).sum().item())
        assert scores == sorted(scores, reverse=True) and len({str(record["tokens"]) for record in texts}) == 3
    groups = records(run(f"{line} --num-samples 4 --num-beam-groups 4 --diversity-penalty 100")[0])
    assert len({record["tokens"][0] for record in groups[:4]}) == 4


def test_stop_strings_are_typed_with_escapes(run, loaded):
    assert tool.unescaped(r"\n\t\\n x\y") == "\n\t\\n x\\y"
    newline = loaded.tokenizer.encode("\n")[0]
    line = f"--tokens-to-generate 6 --greedy --json --forced-bos-token-id {newline} --stop"
    assert [record["text"] for record in records(run(line, r"\n")[0])] == ["", ""]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-beams 2 --num-samples 3", "--num-samples 3: a search with --num-beams 2 finds 2 texts"),
        ("--num-beams 2 --logprobs 1", "--logprobs 1: there are no log-probabilities with beam search"),
        ("--no-use-cache --prompt-logprobs", "--prompt-logprobs: there are no log-probabilities with --no-use-cache"),
        ("--prompt-seeds 1 2 3", "3 seeds for 2 prompts"),
        ("--stop-token-ids 5000", "--stop-token-ids 5000: there is no token 5000"),
        ("--stream --output x", "--stream is for the terminal, and --output x for a file"),
        ("--logprobs -1", "--logprobs -1: has to be 0 or more"),
        ("--logprobs 100000", "log-probabilities of 100000 tokens"),
        ("--frequency-penalty 5", "--frequency-penalty 5.0: has to be between -2 and 2"),
    ],
)
def test_what_cannot_be_is_named(flags, words, run):
    with pytest.raises(SettingsError, match=words):
        run(flags)


def test_an_output_that_is_a_folder_is_refused_before_the_model_is_loaded(tmp_path):
    with pytest.raises(StorageError, match="is a folder"):
        tool.main(["--load", "gone", "--prompt", "a", "--output", str(tmp_path)])


def test_unknown_settings_of_python_are_named(loaded):
    with pytest.raises(SettingsError, match="there is no setting top_kk of generation; did you mean top_k"):
        loaded.generate("a", top_kk=3)
    with pytest.raises(SettingsError, match="there is no setting sampling"):
        loaded.generate("a", sampling=3)


@pytest.mark.parametrize(
    "flags, idle",
    [
        ("--greedy --min-p 0.1 --prompt-seeds 1 2", ["--min-p 0.1", "--prompt-seeds 1 2"]),
        ("--top-k 1 --num-samples 2", ["--num-samples 2"]),
        ("--num-beams 2 --num-samples 2", []),
        ("--top-p-decay 0.9 --top-p-bound 0.1", ["--top-p-decay 0.9", "--top-p-bound 0.1"]),
        ("--top-p 0.9 --top-p-decay 0.9 --top-p-bound 0.1 --min-p 0.1", []),
    ],
)
def test_settings_without_effect_are_named(flags, idle, run):
    _, err = run(f"--tokens-to-generate 2 {flags}")
    assert [line.split(" has no effect")[0] for line in err.splitlines() if "has no effect" in line] == [
        f"note: {words}" for words in idle
    ]


def test_the_models_folder_may_recommend_settings(checkpoint, run):
    """Hugging Face's generation_config.json; flags count before it, and what it has beside them is named."""
    path = checkpoint / "generation_config.json"
    eod = load_model(str(checkpoint)).tokenizer.eod
    content = dict(do_sample=False, temperature=0.7, max_new_tokens=5, eos_token_id=[eod, 3], repetition_penalty=1.3)
    plain = "--greedy --repetition-penalty 1.3 --stop-token-ids 3 --json"
    wanted = {length: records(run(f"{plain} --tokens-to-generate {length}")[0]) for length in (5, 7)}
    drawn = records(
        run("--repetition-penalty 1.3 --stop-token-ids 3 --json --top-k 9 --temperature 0.7 --max-tokens 5")[0]
    )
    try:
        path.write_text(json.dumps(content | dict(watermarking_config=dict(bias=2.0), transformers_version="5")))
        out, err = run("--json")
        assert records(out) == wanted[5]
        assert f"{path} sets tokens_to_generate, repetition_penalty, greedy, eos_token_id\n" in err
        assert f"{path}: watermarking_config: there is no such setting here" in err
        assert records(run("--json --max-new-tokens 7")[0]) == wanted[7]
        assert records(run("--json --top-k 9")[0]) == drawn
        assert len(records(run("--json --num-beams 2")[0])) == 2
        path.write_text(json.dumps(content | dict(forced_bos_token_id=5)))
        out, err = run("--json")
        assert records(out) == wanted[5] and "forced_bos_token_id of generation_config.json is left out" in err
        assert all(one["tokens"][0] == 4 for one in records(run("--json --forced-bos-token-id 4")[0]))
        path.write_text("[]")
        with pytest.raises(DataError, match="generation_config.json: not a generation config"):
            run("--json")
    finally:
        path.unlink()
