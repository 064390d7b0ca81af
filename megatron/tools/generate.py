# SPDX-License-Identifier: Apache-2.0
"""Generate text with a trained model.

    python -m megatron.tools.generate --load runs/quickstart/checkpoints --prompt "The module" --top-p 0.9
    python -m megatron.tools.generate --load runs/chat --chat
    python -m megatron.tools.launch --nproc-per-node 4 -m megatron.tools.generate --load runs/t5 --prompt "..." \\
        --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2

Everything about the model and its vocabulary is read from the checkpoint, whatever layout wrote it. Prompts come from
--prompt (one or several) or from a file, one a line. With --chat they are messages or conversations that the model answers
in its chat template; without any, what is typed is one conversation, line by line. Ranks share the model, and the first
one prints. docs/generation.md explains the settings.
"""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Optional

from megatron.convert.given_model import EXPORTED, SAME_BITS, check_one_model, load_one_model
from megatron.errors import DataError, SettingsError, UsageError, missing_file, run_main
from megatron.guard.job import on_ranks
from megatron.inference import generation_config
from megatron.inference.expert_ranks import expert_parallel
from megatron.inference.sampling import Sampling, Search, asks_for_beams, cut_off
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.cpu_memory import bound_kernel_caches
from megatron.settings import rank_env
from megatron.settings.declare import Needs, declared, idle_flags
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.parse import parse_with_record, said
from megatron.settings.schema import Parallel, TokenizerSettings, setting
from megatron.settings.statements import Statement, given_values, in_users_words, words_of
from megatron.storage import hub
from megatron.storage.durable import check_output


@dataclass(frozen=True)
class GenerateOptions:
    """The model, the prompts and the output."""

    load: Optional[str] = setting(
        "folder of checkpoints, or one checkpoint", None, "--model-dir", "--model-name-or-path"
    )
    load_exported: Optional[str] = setting(EXPORTED, None)
    prompt: Optional[list[str]] = setting("texts to continue", None, "--prompts")
    prompt_file: Optional[str] = setting("file with one text a line; - is standard input", None, "--sample-input-file")
    chat: bool = setting(
        "prompts are messages of a user, or conversations as JSON, which the model answers in its chat template; without "
        "prompts the lines of standard input are one conversation",
        False,
    )
    chat_template: Optional[str] = setting(
        "--chat: Jinja file, or a name: chatml, plain, qwen3 (default: the template in the model's folder or the "
        "tokenizer's)",
        None,
        needs="chat",
    )
    system_prompt: Optional[str] = setting("--chat: the system's message before each conversation", None, needs="chat")
    output: Optional[str] = setting(
        "file for the texts, instead of standard output", None, "--sample-output-file", "--genfile", "--output-path"
    )
    num_samples: int = setting(
        "continuations of each prompt; of beam search the best ones", 1, "--num-return-sequences"
    )
    prompt_seeds: Optional[list[int]] = setting(
        "a seed for each prompt, so that its texts do not depend on the others (default: --sampling-seed for all)", None
    )
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "default: as trained", None, "--bf16=bf16", "--fp16=fp16"
    )
    use_cache: bool = setting(
        "keep keys and values of earlier tokens; off: compute them again (slow, same text)", True, "--recompute=false"
    )
    batch_invariant_mode: bool = setting(SAME_BITS, False)
    stream: bool = setting("print texts while they are generated", False)
    logprobs: Optional[int] = setting(
        "also print the log-probability of each new token, and this many likelier ones in its place",
        None,
        "--top-n-logprobs",
        "--return-log-probs~=0/",
    )
    prompt_logprobs: bool = setting("also print those of the prompts' tokens", False)
    json: bool = setting("one JSON object a line: prompt, text, tokens, finish", False)
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    expert_model_parallel_size: int = setting(
        "of these, ranks that hold different experts; the others divide each expert", 1, "--ep"
    )
    pipeline_model_parallel_size: Optional[int] = setting("ranks that share the layers (default: 1)", None, "--pp")
    encoder_pipeline_stages: Optional[int] = setting(
        "encoder-decoders: the first so many pipeline ranks have layers of the encoder (default: all)", None
    )
    decoder_pipeline_stages: Optional[int] = setting(
        "encoder-decoders: the last so many pipeline ranks have layers of the decoder (default: all)", None
    )
    distributed_timeout_minutes: float = setting("a silent rank is given up after this long", 10.0)
    save_inference_model_then_exist: bool = setting(
        "PaddleNLP's: export the program of the next token to --output, or to inference_model_pp1mpN, and end; in place of "
        "an earlier export there",
        False,
    )

    @property
    def halves(self) -> tuple[Optional[int], Optional[int]]:
        """Pipeline ranks with layers of the encoder, and of the decoder; None: all."""
        return self.encoder_pipeline_stages, self.decoder_pipeline_stages

    @property
    def talks(self) -> bool:
        """Whether the prompts are typed, as messages of one conversation."""
        return self.chat and not self.prompt and self.prompt_file is None

    @property
    def pp(self) -> int:
        """Pipeline ranks; by default as many of this job's ranks as `halves` allow, which may overlap."""
        if self.pipeline_model_parallel_size is not None:
            return self.pipeline_model_parallel_size
        least, most = max(1, *(half or 1 for half in self.halves)), max(1, sum(half or 0 for half in self.halves))
        here = rank_env.ranks().world_size // max(1, self.tensor_model_parallel_size)
        return here if least <= here <= most else most


COMMON = tuple(
    """
    load load_exported prompt prompt_file chat output stream num_samples tokens_to_generate greedy temperature top_k
    top_p repetition_penalty stop sampling_seed num_beams logprobs device json tensor_model_parallel_size
    pipeline_model_parallel_size
    """.split()
)


DRAWN = {
    "prompt_seeds": declared("needs", Sampling)["sampling_seed"],
    "num_samples": Needs(
        "sampling or --num-beams: all texts of a prompt are the same", lambda s: s.beams > 1 or not s.is_greedy
    ),
}


OF_PROGRAM = frozenset(  # settings that count with --save-inference-model-then-exist
    "load load_exported ckpt_step precision output tensor_model_parallel_size save_inference_model_then_exist".split()
)


def main(argv: list[str]) -> None:
    rank_env.adopt_launcher()
    bound_kernel_caches()
    kinds = dict(
        generate=GenerateOptions,
        quantize=QuantizeOptions,
        sampling=Sampling,
        search=Search,
        tokenizer=TokenizerSettings,
    )
    recommended = recommended_for(said(argv, kinds))
    groups, given = parse_with_record(
        argv,
        kinds,
        prog="python -m megatron.tools.generate",
        description="Continue texts with a trained model.",
        common=COMMON,
        defaults=recommended.settings,
    )
    settings, sampling, search = groups["generate"], groups["sampling"], groups["search"]
    if recommended.downloaded:
        settings = replace(settings, load_exported=recommended.downloaded)
    with failing_in_users_words(given):
        if settings.save_inference_model_then_exist:
            return export_program(settings, given)
        check(settings, given)
        sampling.check(given)
        sampling, notes = sampling.normalized()
        notes += recommended.notices(sampling)
        sampling = replace(sampling, stop=[unescaped(text) for text in sampling.stop or ()] or None)
        search.check(sampling, given)
        if asks_for_beams(given) and "length_penalty" not in given:
            notes.append("--length-penalty is 1: scores are means over tokens. PaddleNLP's default is 0, sums")
        notes += idle_flags(sampling, given, beams=search.num_beams)
        notes += idle_flags(groups["quantize"], given)
        notes += idle_flags(settings, given)
        notes += idle_flags(
            settings, given, DRAWN, **vars(sampling), is_greedy=sampling.is_greedy, beams=search.num_beams
        )
        here = rank_env.ranks()
        rank_env.print_notes(notes)
        piped = settings.prompt_file == "-" and here.rank > 0  # standard input is the first rank's
        prompts = None if piped or settings.talks else read_prompts(settings)

        parallel = Parallel(
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            pipeline_model_parallel_size=settings.pp,
            **expert_parallel(settings.tensor_model_parallel_size, settings.expert_model_parallel_size),
            distributed_timeout_minutes=settings.distributed_timeout_minutes,
            batch_invariant_mode=settings.batch_invariant_mode,
        )

        def work(context) -> None:
            from megatron.mpu.collectives import broadcast_object

            texts = broadcast_object(prompts, context.mesh.world)
            write(settings, groups["quantize"], sampling, search, given, texts, context)

        on_ranks(parallel, settings.device, work, settings.load)


class RecommendedSettings(NamedTuple):
    """Settings of the generation_config.json beside the model.

    file: its path; unknown: its keys that have no equivalent here; ends: whether it names the tokens that end a text
    downloaded: the folder of a model of the hub, which was downloaded to read them
    """

    settings: dict[str, object]
    file: str = ""
    unknown: Sequence[str] = ()
    ends: bool = False
    downloaded: Optional[str] = None

    def notices(self, sampling: Sampling) -> list[str]:
        """What the file sets, without what has no effect on a greedy choice, and what it cannot set."""
        idle = {name for name in generation_config.DRAWN if sampling.is_greedy}
        if not sampling.greedy:  # one of these makes the choice greedy
            idle -= {name for name, value in (("temperature", 0), ("top_k", 1)) if self.settings.get(name) == value}
        sets = [*(name for name in self.settings if name not in idle), *["eos_token_id"] * self.ends]
        found = [f"{self.file} sets {', '.join(sets)}"] * bool(sets)
        return found + generation_config.unknown_notices(self.file, self.unknown)


def recommended_for(given: Mapping[str, Statement]) -> RecommendedSettings:
    """The settings that the model's folder recommends. Raises DataError for an invalid file."""
    folders = [str(given[name].value) for name in ("load_exported", "load") if name in given]
    if not folders:
        return RecommendedSettings({})
    download = "load_exported" in given and hub.is_hub(folders[0])
    folder = str(hub.fetched(folders[0], hub.MODEL_FILES)) if download else folders[0]
    found = generation_config.read(folder, frozenset(given))
    name = f"{folders[0]}/{generation_config.NAME}"
    ends = found.ends is not None
    return RecommendedSettings(found.settings, name, found.unknown, ends, folder if download else None)


def export_program(settings: GenerateOptions, given: Mapping[str, Statement]) -> None:
    """Export the program of the next token, for as many ranks as are requested. One process writes all of it."""
    check_one_model(settings, given)
    if rank_env.ranks().rank > 0:
        return
    idle = [one.words for name, one in given.items() if name not in OF_PROGRAM and one.is_request]
    if idle:
        why = "have no effect with --save-inference-model-then-exist, which writes a program and no text"
        rank_env.print_notes([f"{', '.join(idle)}: {why}"])
    from megatron.tools import export

    tp, step = settings.tensor_model_parallel_size, settings.ckpt_step
    out = Path(settings.output or f"inference_model_pp1mp{tp}")
    flags = {"--load": settings.load or settings.load_exported, "--output": out}
    flags |= {"--format": "torch-export", "--kind": "generation", "--tensor-model-parallel-size": tp}
    flags |= {"--ckpt-step": step} if step is not None else {}
    flags |= {"--dtype": settings.precision} if settings.precision else {}
    with earlier_export_aside(out):
        export.main([str(word) for pair in flags.items() for word in pair])


@contextmanager
def earlier_export_aside(out: Path) -> Iterator[None]:
    """Write an export in the place of an earlier one, which comes back after an error."""
    if not (out / "export.json").is_file():
        yield
        return
    old = out.with_name(f"{out.name}.old")
    if old.exists():
        raise SettingsError(
            f"{old} is there already, and {out} would be moved to it", do="remove it, or --output FOLDER"
        )
    out.rename(old)
    try:
        yield
    except BaseException:
        old.rename(out)
        raise
    others = {path.name for path in old.iterdir()} - {path.name for path in out.iterdir()}
    if not others:
        shutil.rmtree(old)
    kept = f"; {', '.join(sorted(others)[:4])} are in {old}" if others else ""
    print(f"note: {out} replaces an earlier export (--output names another folder){kept}", file=sys.stderr)


def check(settings: GenerateOptions, given: Mapping[str, Statement]) -> None:
    """Raise SettingsError or StorageError for settings that cannot work, before torch is loaded.

    given: setting -> its source
    """
    check_one_model(settings, given)
    tp, pp = settings.tensor_model_parallel_size, settings.pp
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, num_samples=settings.num_samples)
    for name, size in sizes.items():
        if size < 1:
            raise SettingsError(f"{words_of(given, name, size)}: has to be at least 1")
    if settings.stream and settings.output:
        raise SettingsError(
            f"--stream is for the terminal, and --output {settings.output} for a file", do="leave one out"
        )
    others = dict(output=settings.output, num_samples=settings.num_samples > 1, prompt_seeds=settings.prompt_seeds)
    if settings.talks and (wrong := [name for name, asked in others.items() if asked]):
        raise SettingsError(
            f"{words_of(given, wrong[0], getattr(settings, wrong[0]))}: messages that are typed have one answer each, on "
            "the terminal",
            do="leave it out, or give messages with --prompt or --prompt-file",
        )
    if settings.output:
        check_output("--output", settings.output)
    if settings.logprobs is not None and settings.logprobs < 0:
        raise SettingsError(f"{words_of(given, 'logprobs', settings.logprobs)}: has to be 0 or more")
    if not settings.distributed_timeout_minutes > 0:
        minutes = words_of(given, "distributed_timeout_minutes", settings.distributed_timeout_minutes)
        raise SettingsError(f"{minutes}: has to be above 0")
    expert_parallel(tp, settings.expert_model_parallel_size)
    rank_env.refuse_other_ranks(tp, pp)


def write(
    settings: GenerateOptions,
    quantize: QuantizeOptions,
    sampling: Sampling,
    search: Search,
    given: Mapping[str, Statement],
    texts: list[str],
    context,
) -> None:
    """Continue texts on the ranks of a job (`mpu.initialize.RankContext`); the first of them prints.

    given: setting -> who gave it
    """
    from megatron.inference.answers import Asked, answered
    from megatron.inference.load import open_tokenizer
    from megatron.tokenizer.embedding_rows import tokenless

    loaded = load_one_model(
        settings.load,
        settings.load_exported,
        device=context.device,
        precision=settings.precision,
        step=settings.ckpt_step,
        mesh=context.mesh,
        halves=settings.halves,
        quantize=quantize,
        batch_invariant=settings.batch_invariant_mode,
    )
    loaded.check_words()
    pairs = hasattr(loaded.model, "decode")  # an encoder-decoder: prompts are sources
    _refuse_other_models(loaded, search, pairs, settings.chat)
    tokenizer = open_tokenizer(loaded, given_values(TokenizerSettings, given))
    notes = list(loaded.notices)
    if (rows := tokenless(tokenizer, loaded.vocab_size)) and context.is_rank_zero:
        print(f"note: {rows}", file=sys.stderr)
    if sampling.top_k > tokenizer.vocab_size:
        notes.append(
            f"--top-k {sampling.top_k} is more than the {tokenizer.vocab_size} tokens that there are: all count"
        )
    forced = given.get("forced_bos_token_id")
    if not pairs and forced and not forced.is_given:  # it is generation_config.json's
        sampling = replace(sampling, forced_bos_token_id=None)
        notes.append(
            "forced_bos_token_id of generation_config.json is left out: in transformers it acts after prompts of one token "
            "alone (--forced-bos-token-id forces it)"
        )
    asked = Asked(
        texts,
        sampling,
        search,
        settings.num_samples,
        settings.prompt_seeds,
        settings.use_cache,
        settings.logprobs,
        settings.prompt_logprobs,
    )
    apart = " -> " if pairs else ""
    if settings.chat:
        from megatron.inference import chats

        words = loaded.config.tokenizer.overridden(given_values(TokenizerSettings, given))
        folder = settings.load or settings.load_exported
        template = chats.template_of(loaded, tokenizer, words, folder, settings.chat_template)
        asked, apart = replace(asked, end=chats.ends_of(loaded, template)), "\n"
        if settings.talks:
            return talk(settings, loaded, template, asked, notes, context)
        talks = [chats.chat_in(text, settings.system_prompt, f"prompt {n}") for n, text in enumerate(texts, 1)]
        ids = [one.encoded(template, f"prompt {n}") for n, one in enumerate(talks, 1)]
        asked = replace(asked, prompts=[one.shown for one in talks], ids=ids)
        if left := sum(one.without > 0 for one in talks):
            notes.append(
                f"the last answer of {left} of {len(talks)} conversations is left out: the model gives its own"
            )
    printed = Printed(asked, tokenizer, as_json=settings.json, apart=apart)
    streams, start = settings.stream and context.is_rank_zero, time.perf_counter()
    found = answered(loaded, tokenizer, asked, context.mesh.pp, *[printed.stream] * streams)
    if not context.is_rank_zero:
        return
    seconds, tokens = time.perf_counter() - start, [answer.tokens for answer in found.answers]
    cut = [answer.tokens if answer.finish == "length" else [] for answer in found.answers]
    for note in [*notes, *found.notices, *cut_off(found.rooms, cut, sampling)]:
        print(f"note: {in_users_words(note, given)}", file=sys.stderr)
    if settings.output:
        write_output(Path(settings.output), printed.all(found.answers))
    elif not settings.stream:
        print(printed.all(found.answers), end="")
    count = sum(map(len, tokens))
    print(f"{loaded.path}: {count} tokens in {seconds:.2f} s = {count / seconds:.0f} tokens/s", file=sys.stderr)


def talk(settings: GenerateOptions, loaded, template, asked, notes: list[str], context) -> None:
    """Answer the messages that the first rank reads from standard input, each after those before it."""
    from megatron.inference.answers import answered
    from megatron.inference.chats import ChatPrompt, typed
    from megatron.mpu.collectives import broadcast_object

    first, tokenizer = context.is_rank_zero, template.tokenizer
    for note in notes if first else ():
        print(f"note: {note}", file=sys.stderr)
    turns = typed(settings.system_prompt) if first else None
    while True:
        messages = next(turns, None) if first else None
        ids = broadcast_object(messages and ChatPrompt(tuple(messages)).encoded(template), context.mesh.world)
        if ids is None:
            return
        asked = replace(asked, prompts=[messages[-1]["content"] if first else ""], ids=[ids])
        printed = Printed(asked, tokenizer, as_json=settings.json)
        printed.prompts = asked.prompts if settings.json else [""]  # which are on the screen
        found = answered(loaded, tokenizer, asked, context.mesh.pp, *[printed.stream] * first)
        if first:
            [answer] = found.answers
            messages.append({"role": "assistant", "content": answer.text})
            if answer.finish == "length":
                print("note: the answer was cut; --tokens-to-generate N allows longer ones", file=sys.stderr)


def _refuse_other_models(loaded, search: Search, pairs: bool, chat: bool) -> None:
    """Raise SettingsError if the model generates nothing, or flags are for encoder-decoders, or not for them. pairs:
    whether it is one; chat: whether it has to answer conversations
    """
    if pairs and chat:
        raise SettingsError(
            f"--chat: {loaded.path} holds an encoder-decoder, whose prompts are sources", do="leave it out"
        )
    if not (pairs or loaded.continues_texts):
        raise SettingsError(
            f"{loaded.path} holds a model of type {loaded.config.model.model_type}, which generates nothing",
            "its module has no method logits for the next token, as a GPT has",
        )
    for flag, value in (("start", search.decoder_start_id), ("end", search.decoder_end_id)):
        if value is not None and not pairs:
            raise SettingsError(
                f"--decoder-{flag}-id {value} is of encoder-decoders, and {loaded.path} holds none", do="leave it out"
            )


def read_prompts(settings: GenerateOptions) -> list[str]:
    """The texts to continue. Raises UsageError when there are none, DataError when their file is missing."""
    if settings.prompt and settings.prompt_file:
        raise UsageError("--prompt and --prompt-file were both given", do="give one of them")
    prompts = settings.prompt or []
    if settings.prompt_file == "-":
        prompts = sys.stdin.read().split("\n")
    elif settings.prompt_file:
        try:
            prompts = Path(settings.prompt_file).read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            raise missing_file(settings.prompt_file, "--prompt-file") from None
        except (IsADirectoryError, UnicodeDecodeError) as error:
            raise DataError(f"--prompt-file {settings.prompt_file}: not a UTF-8 text file", str(error)) from None
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UsageError(
            "there is no text to continue", do='--prompt "Once upon a time", or --prompt-file FILE; or --chat'
        )
    return prompts


def unescaped(text: str) -> str:
    r"""A stop string as typed on a command line: \n is a newline, \t a tab, \\ a backslash.

    >>> unescaped(r"a\nb") == "a" + chr(10) + "b"
    True
    """
    known = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}
    return re.sub(r"\\[ntr\\]", lambda found: known[found.group()], text)


class Printed:
    """Answers as text or JSON, all together or while they grow. asked: `inference.answers.Asked`."""

    def __init__(self, asked, tokenizer, *, as_json: bool, apart: str = ""):
        """apart: the text between a prompt and its answer."""
        self.asked, self.tokenizer, self.as_json, self.apart = asked, tokenizer, as_json, apart
        self.prompts = [prompt for prompt in asked.prompts for _ in range(asked.samples)]
        self.place = 0  # of the answer that is printed as it grows; later ones wait for its end
        self.waiting: dict[int, tuple[str, object]] = {}  # their text so far, and the answer

    def all(self, answers) -> str:
        """All answers, one after another."""
        return "".join(
            self.head(place) + ("" if self.as_json else answer.text) + self.tail(place, answer)
            for place, answer in enumerate(answers)
        )

    def stream(self, place: int, text: str, answer) -> None:
        """Print new text of an answer (`inference.answers.OnText`)."""
        before = self.waiting[place][0] if place in self.waiting else self.head(place)
        self.waiting[place] = before + ("" if self.as_json else text), answer
        while self.place in self.waiting:
            text, answer = self.waiting[self.place]
            ended = answer.finish is not None
            print(text + (self.tail(self.place, answer) if ended else ""), end="", flush=True)
            self.waiting[self.place] = "", answer
            if not ended:
                break
            del self.waiting[self.place]
            self.place += 1

    def head(self, place: int) -> str:
        """What comes before an answer."""
        if self.as_json:
            return ""
        return ("-" * 40 + "\n") * (place > 0) + self.prompts[place] + self.apart

    def tail(self, place: int, answer) -> str:
        """What follows an answer."""
        if not self.as_json:
            return "\n" + "".join(self._line(score) for score in (*answer.prompt, *answer.scores))
        record = dict(prompt=self.prompts[place], text=answer.text, tokens=answer.tokens, finish=answer.finish)
        if self.asked.logprobs is not None:
            record["logprobs"] = [self._record(score) for score in answer.scores]
        if self.asked.prompt_logprobs:
            record["prompt_logprobs"] = [self._record(score) for score in answer.prompt]
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _line(self, score) -> str:
        """A token's log-probability, itself, and the likeliest tokens with theirs."""
        own = "       -" if score.logprob is None else f"{score.logprob:8.3f}"
        others = "".join(f"  {logprob:.3f} {self._quoted(token)}" for token, logprob in score.top)
        return f"{own} {self._quoted(score.token)}" + (" :" + others) * bool(others) + "\n"

    def _record(self, score) -> dict:
        own = dict(token=score.token, text=self.tokenizer.decode([score.token]), logprob=score.logprob)
        top = [dict(token=token, text=self.tokenizer.decode([token]), logprob=logprob) for token, logprob in score.top]
        return own | (dict(top=top) if self.asked.logprobs else {})

    def _quoted(self, token: int) -> str:
        return json.dumps(self.tokenizer.decode([token]), ensure_ascii=False)


def write_output(path: Path, texts: str) -> None:
    """Write or replace a file of texts. Raises StorageError if it cannot be written."""
    from megatron.storage.durable import replace_file, storage_errors

    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            print(f"note: replaces {path}", file=sys.stderr)
        replace_file(path, texts.encode())


if __name__ == "__main__":
    run_main(main)
