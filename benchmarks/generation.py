# SPDX-License-Identifier: Apache-2.0
"""Generation on a CPU beside transformers and llama.cpp: the shape of GPT-2 124M, the same random weights, greedy.

    OMP_NUM_THREADS=2 python benchmarks/generation.py                    # all, five rounds: 15 minutes on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/generation.py --cpu-time         # on a busy machine: one thread, its CPU time
    OMP_NUM_THREADS=2 python benchmarks/generation.py --busy-stages      # how long each of two stages computes
    OMP_NUM_THREADS=2 python benchmarks/generation.py --attention        # new tokens of all texts, in a call and in calls

In each round the contenders take turns at each task, and a ratio is the median of its rounds' ratios. Tasks: `prefill`, a
prompt of 512 tokens; `decode 1` and `decode 16`, new tokens of 1 and 16 texts after prompts of 64 tokens. transformers
runs `generate` with its static cache, in eager mode, and compiled. llama.cpp is measured by its own timings, not with
--cpu-time. A first round, which is not counted, compares the tokens of both. Needs transformers, xllamacpp and gguf (or
--no-llama).
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from megatron.fused_kernels import decode_attention
from megatron.inference.engine import Engine
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.inference.stages import DecoderStages, stages_of
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.hf_names import matches
from megatron.model.gpt.module import GPT
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model

WORDS, LONGEST = 50257, 1024
SHAPE = Model(
    num_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    seq_length=LONGEST,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bias_gelu_fusion=True,
)
FORMATS = dict(fp32=torch.float32, bf16=torch.bfloat16)
PREFILL, PROMPT, NEW = 512, 64, 24
ATTENTION = (  # texts, tokens of each, groups, queries of a group, channels
    (1, 88, 12, 1, 64),
    (16, 88, 12, 1, 64),
    (16, 400, 12, 1, 64),
    (16, 200, 4, 4, 64),
    (16, 200, 4, 8, 128),
)


def prompts(batch: int, length: int) -> list[list[int]]:
    """Texts without a common beginning."""
    draw = torch.Generator().manual_seed(batch * length)
    return torch.randint(WORDS, (batch, length), generator=draw).tolist()


class Ours:
    """The generation engine."""

    name = "engine"

    def __init__(self, theirs: torch.nn.Module, dtype: torch.dtype):
        self.model = GPT(SHAPE, Mesh(), WORDS, dtype=dtype).eval()
        own, weights = dict(self.model.named_parameters()), theirs.state_dict()
        for match in matches("gpt2", SHAPE):
            value = match.to_ours([weights[name].float() for name in match.theirs])
            own[match.ours].data[: len(value)] = value
        self.engine = Engine(self.model, longest=LONGEST, max_batch=16)

    def prefill(self, clock: Callable[[], float]) -> float:
        self.engine.weights_changed()  # forgets the prompt of the round before
        start = clock()
        self.run(prompts(1, PREFILL), 1)
        return clock() - start

    def decode(self, batch: int, clock: Callable[[], float]) -> float:
        self.engine.weights_changed()
        return self.run(prompts(batch, PROMPT), NEW, clock)[0]

    def run(self, texts: list[list[int]], new: int, clock=time.perf_counter) -> tuple[float, list[list[int]]]:
        """(seconds of a step after the first tokens, the new tokens)."""
        numbers = {self.engine.add(Request(tuple(text), Sampling(new, greedy=True))): [] for text in texts}
        starts: list[float] = []
        while self.engine.busy:
            if all(numbers.values()):
                starts.append(clock())
            for output in self.engine.step():
                numbers[output.request].append(output.new.token)
        return (clock() - starts[0]) / len(starts) if starts else 0.0, list(numbers.values())


class Transformers:
    """Hugging Face's `generate` with a static cache."""

    def __init__(self, model: torch.nn.Module, compiled: bool):
        self.model, self.name = model, "transformers, compiled" if compiled else "transformers"
        self.more = dict(do_sample=False, cache_implementation="static", pad_token_id=0)
        self.more |= {} if compiled else dict(disable_compile=True)
        if compiled:
            from transformers import CompileConfig

            self.more["compile_config"] = CompileConfig(mode="default", fullgraph=False)
            self.more["compile_config"]._compile_all_devices = True  # else `generate` compiles on GPUs only

    def prefill(self, clock: Callable[[], float]) -> float:
        start = clock()
        with torch.inference_mode():
            self.model(torch.tensor(prompts(1, PREFILL)), logits_to_keep=1)
        return clock() - start

    def decode(self, batch: int, clock: Callable[[], float]) -> float:
        texts = prompts(batch, PROMPT)
        return (self.seconds(texts, NEW, clock) - self.seconds(texts, 1, clock)) / (NEW - 1)

    def seconds(self, texts: list[list[int]], new: int, clock: Callable[[], float]) -> float:
        start = clock()
        self.run(texts, new)
        return clock() - start

    def run(self, texts: list[list[int]], new: int) -> list[list[int]]:
        with torch.inference_mode():
            ids = torch.tensor(texts)
            more = dict(max_new_tokens=new, min_new_tokens=new, attention_mask=torch.ones_like(ids))
            return self.model.generate(ids, **more, **self.more)[:, len(texts[0]) :].tolist()


class LlamaCpp:
    """llama.cpp's server in this process, by its own timings: always wall time."""

    name = "llama.cpp"

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, threads: int, folder: Path):
        import xllamacpp

        path = folder / f"{dtype}.gguf"
        write_gguf(model, path, dtype)
        self.servers = {batch: self.server(xllamacpp, path, batch, threads) for batch in (1, 16)}

    @staticmethod
    def server(xllamacpp, path: Path, batch: int, threads: int):
        given = xllamacpp.CommonParams()
        given.model.path, given.n_ctx, given.n_parallel = str(path), LONGEST * batch, batch
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
        given.n_batch = given.n_ubatch = PREFILL
        given.warmup, given.verbosity = False, -1
        return xllamacpp.Server(given)

    def prefill(self, clock) -> float:
        return self.run(prompts(1, PREFILL), 1)[0]["prompt_ms"] / 1000

    def decode(self, batch: int, clock) -> float:
        found = self.run(prompts(batch, PROMPT), NEW)
        return statistics.median(one["predicted_per_token_ms"] for one in found) / 1000

    def run(self, texts: list[list[int]], new: int) -> list[dict]:
        server, found = self.servers[len(texts)], []

        def ask(text: list[int]) -> None:
            asked = dict(prompt=text, n_predict=new, temperature=0, cache_prompt=False, ignore_eos=True)
            answer = server.handle_completions(asked)
            found.append((answer if isinstance(answer, dict) else json.loads(answer))["timings"])

        threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def write_gguf(model: torch.nn.Module, path: Path, dtype: torch.dtype) -> None:
    """The weights for llama.cpp, with a vocabulary of made-up words."""
    import gguf

    kind = gguf.GGMLQuantizationType.F32 if dtype == torch.float32 else gguf.GGMLQuantizationType.BF16
    out = gguf.GGUFWriter(path, "gpt2")
    out.add_block_count(SHAPE.num_layers)
    out.add_context_length(LONGEST)
    out.add_embedding_length(SHAPE.hidden_size)
    out.add_feed_forward_length(4 * SHAPE.hidden_size)
    out.add_head_count(SHAPE.num_attention_heads)
    out.add_layer_norm_eps(1e-5)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([f"w{number}" for number in range(WORDS)])
    out.add_token_types([1] * WORDS)
    out.add_token_merges(["w 0"])
    out.add_eos_token_id(WORDS - 1)
    weights = {name: value.float().numpy() for name, value in model.state_dict().items()}

    def add(ours: str, value: np.ndarray) -> None:
        value = np.ascontiguousarray(value, dtype=np.float32)
        if value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            out.add_tensor(ours, value)
        else:
            out.add_tensor(ours, gguf.quants.quantize(value, kind), raw_dtype=kind)

    add("token_embd.weight", weights["transformer.wte.weight"])
    add("output.weight", weights["transformer.wte.weight"])
    out.add_tensor("position_embd.weight", weights["transformer.wpe.weight"].copy())
    for name in ("weight", "bias"):
        add(f"output_norm.{name}", weights[f"transformer.ln_f.{name}"])
    names = dict(attn_norm="ln_1", ffn_norm="ln_2", attn_qkv="attn.c_attn", attn_output="attn.c_proj")
    for layer in range(SHAPE.num_layers):
        for ours, theirs in (names | dict(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")).items():
            for name in ("weight", "bias"):
                add(f"blk.{layer}.{ours}.{name}", weights[f"transformer.h.{layer}.{theirs}.{name}"].T)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def contenders(dtype: torch.dtype, asked: argparse.Namespace, folder: Path) -> list:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    theirs = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=None)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.dim() > 1:
                weight.mul_(3)  # so that likeliest tokens are not close
    theirs = theirs.to(dtype)
    found = [Ours(theirs, dtype), Transformers(theirs, False)]
    [ours, plain] = (one.run(prompts(4, PROMPT), NEW) for one in found)
    equal = sum(a == b for a, b in zip(ours[1], plain, strict=True))
    print(f"{dtype}: {equal} of 4 texts of {NEW} tokens are equal", flush=True)
    if asked.compile:
        found.append(Transformers(theirs, True))
    if asked.llama and not asked.cpu_time:
        found.append(LlamaCpp(theirs, dtype, torch.get_num_threads(), folder))
    return found


def compare(name: str, asked: argparse.Namespace, folder: Path) -> None:
    clock = time.process_time if asked.cpu_time else time.perf_counter
    tasks = {
        "prefill": lambda one: one.prefill(clock),
        "decode 1": lambda one: one.decode(1, clock),
        "decode 16": lambda one: one.decode(16, clock),
    }
    seconds: dict[str, dict[str, list[float]]] = {task: {} for task in tasks}
    all_of_them = contenders(FORMATS[name], asked, folder)
    for number in range(asked.rounds + 1):
        for task, run in tasks.items():
            for one in all_of_them:
                took = run(one)
                if number:  # the first round warms up
                    seconds[task].setdefault(one.name, []).append(took)
    for task, by_name in seconds.items():
        ours = by_name[Ours.name]
        for who, theirs in by_name.items():
            ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            print(
                f"{name} {task:10} {who:24} {1000 * statistics.median(theirs):8.1f} ms   engine is {ratio:.2f} x as fast"
            )
    one, many = (seconds[task][Ours.name] for task in ("decode 1", "decode 16"))
    print(f"{name} 16 slots have {statistics.median(16 * a / b for a, b in zip(one, many)):.1f} x the tokens/s of one")


def busy_stages(name: str, texts: int = 8, new: int = 40) -> None:
    """How long each of two stages, of one thread each, computes while a batch of texts is continued."""
    facts, dtype = GPTFacts(SHAPE, WORDS), FORMATS[name]

    def body(rank: int) -> tuple[float, float]:
        mesh = Mesh(rank, pp=2)
        build = lambda **stage: GPT(SHAPE, mesh, WORDS, dtype=dtype, **stage)
        model = DecoderStages(build, facts, stages_of(facts, 2), mesh).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.02)
        engine = Engine(model, longest=LONGEST, max_batch=texts)
        stage, busy = engine.stage, [0.0]
        run, answered = stage.model.cached_pass, stage._answered

        def timed(work: Callable, *arguments, **more):
            start = time.perf_counter()
            result = work(*arguments, **more)
            busy[0] += time.perf_counter() - start
            return result

        stage.model.cached_pass, stage._answered = partial(timed, run), partial(timed, answered)
        if rank:
            engine.follow()
            return busy[0], 0.0
        sampling = Sampling(new, greedy=True)
        numbers = [engine.add(Request(tuple(text), sampling)) for text in prompts(texts, PROMPT)]
        while len({output.request for output in engine.step()} & set(numbers)) == 0:
            busy[0] = 0.0
        start = time.perf_counter()
        while engine.busy:
            engine.step()
        seconds = time.perf_counter() - start
        engine.close()
        return busy[0], seconds

    (first, seconds), (second, _) = run_ranks(2, body, timeout=600)
    print(f"{name}, {texts} texts: the stages compute {first / seconds:.0%} and {second / seconds:.0%} of the time")


def attention(clock: Callable[[], float], rounds: int) -> None:
    """Attention of new tokens: one call for all texts, and one for each text, in turns. Each of 12 layers has its own
    cache, so that keys come from memory.
    """
    print("texts  tokens  groups x queries  channels   by text us  one call us   ratio")
    for texts, tokens, g, q, d in ATTENTION:
        draw = torch.Generator().manual_seed(1)
        caches = [torch.randn(2, texts * tokens, g, d, generator=draw) for _ in range(SHAPE.num_layers)]
        query = torch.randn(texts, g, q, d, generator=draw)
        of_texts = [(slice(tokens * text, tokens * (text + 1)),) for text in range(texts)]
        took: dict[Callable, list[float]] = {decode_attention.by_text: [], decode_attention.by_pairs: []}
        with torch.inference_mode():
            for number in range(rounds + 1):
                for run, found in took.items():
                    places, start = decode_attention.Places(of_texts, 16, query.device), clock()
                    for keys, values in caches:
                        run(query, keys, values, places, d**-0.5)
                    found += [(clock() - start) / len(caches)] * (number > 0)
        one, all_of_them = (1e6 * statistics.median(found) for found in took.values())
        ratio = statistics.median(a / b for a, b in zip(*took.values(), strict=True))
        print(f"{texts:5}{tokens:8}{f'{g} x {q}':>18}{d:10}{one:13.0f}{all_of_them:13.0f}{ratio:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of this process instead of wall time")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-llama", dest="llama", action="store_false")
    parser.add_argument("--busy-stages", action="store_true", help="how long each of two pipeline stages computes")
    parser.add_argument("--attention", action="store_true", help="attention of new tokens alone")
    asked = parser.parse_args()
    if asked.attention:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
        return attention(time.process_time if asked.cpu_time else time.perf_counter, asked.rounds)
    if asked.busy_stages:
        for name in asked.formats:
            busy_stages(name)
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.formats:
            compare(name, asked, Path(folder))


if __name__ == "__main__":
    main()
