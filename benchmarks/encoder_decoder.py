# SPDX-License-Identifier: Apache-2.0
"""One training step of our T5 1.1 and BERT against the best of Hugging Face's, in one process, taking turns.

    python benchmarks/encoder_decoder.py --model t5 --size base
    python benchmarks/encoder_decoder.py --model bert --size base --rounds 12 --only ours hf-sdpa-bf16-compiled
    python benchmarks/encoder_decoder.py --model t5 --size base --only ours ours-compiled hf-eager-autocast-compiled

A step is forward, backward, clipping and AdamW on fp32 weights in bf16 arithmetic, without dropout, on the same tokens. A
sixth of the tokens of sources fills up (`--full`: none, then nothing is won by leaving those out); 15 % of BERT's are
masked. ours-compiled is ours with --torch-compile. Peers differ in attention (torch's sdpa, or explicit), weights (fp32
under autocast, as HF's Trainer has it; or bf16 with fp32 main weights, as ours) and whether torch.compile compiles the
whole model; all have torch's fused AdamW, and are in one process with ours, so they profit from `keep_memory`.

Every round runs one step of each contender; a ratio is the median over rounds of (time of the peer / time of ours), by the
clock and in CPU seconds of all threads, which other programs on the machine disturb less. The peer that counts is the one
with the least median, and so is ours. Compilers take minutes, and one more shape of padded batches a second time: hence the
rounds of --warmup.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from peer_steps import Times, adamw_step, cpu_seconds

from megatron.data.loader import named_batch
from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.mpu.cpu_memory import keep_memory
from megatron.mpu.mesh import Mesh
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Optimizer
from megatron.training.rules import resolve


class Size(NamedTuple):
    """layers: of BERT, or of each half of T5; source: tokens of a sample; target: of a target; vocabulary: in words."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    source: int
    target: int
    batch: int
    vocabulary: int


SIZES = {
    ("t5", "small"): Size(4, 256, 4, 1024, 256, 64, 16, 8192),
    ("t5", "base"): Size(6, 512, 8, 1024, 512, 114, 4, 32128),
    ("bert", "small"): Size(4, 256, 4, 1024, 256, 0, 16, 8192),
    ("bert", "base"): Size(8, 512, 8, 2048, 512, 0, 4, 30522),
}
T5 = """ --model-type T5 --encoder-num-layers {0.layers} --decoder-num-layers {0.layers} --decoder-seq-length {0.target}
    --position-embedding-type relative --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
    --unscaled-attention --feed-forward-proj gated-gelu --untie-embeddings-and-output-weights"""
BERT = " --model-type BERT --num-layers {0.layers} --post-norm --norm-epsilon 1e-12 --no-bias-gelu-fusion"
SHARED = """--hidden-size {0.hidden} --num-attention-heads {0.heads} --ffn-hidden-size {0.ffn} --seq-length {0.source}
    --vocab-size {0.vocabulary} --make-vocab-size-divisible-by 1 --micro-batch-size {0.batch} --train-iters 1 --lr 1e-3
    --mock-data --device cpu --precision bf16 --hidden-dropout 0 --attention-dropout 0"""
Arrays = dict[str, torch.Tensor]


def batch_of(model: str, size: Size, generator: torch.Generator, full: bool = False) -> Arrays:
    """Arrays of a micro-batch, sequence first. Every other source has a third of its length or more, unless `full`."""
    s, t, b = size.source, size.target, size.batch
    draw = lambda *shape: torch.randint(1, size.vocabulary, shape, generator=generator)
    lengths = torch.randint(s // 3, s + 1, (b,), generator=generator)
    lengths[::2] = s
    mask = (torch.arange(s).unsqueeze(1) < (torch.full((b,), s) if full else lengths)).long()
    if model == "t5":
        arrays = dict(text_enc=draw(s, b), text_dec=draw(t, b), labels=draw(t, b), enc_mask=mask)
        return arrays | dict(loss_mask=torch.ones(t, b), dec_mask=torch.ones(t, b).long())
    masked = (torch.rand(s, b, generator=generator) < 0.15) & (mask > 0)
    arrays = dict(text=draw(s, b), types=torch.zeros(s, b).long(), labels=draw(s, b), padding_mask=mask)
    return arrays | dict(is_random=torch.arange(b) % 2, loss_mask=masked.float())


def ours(flags: str, model: str, size: Size) -> Callable[[Arrays], float]:
    """A step of the suite's own model and optimizer, with the settings that its pages advise and these flags besides."""
    shape = SHARED + (T5 if model == "t5" else BERT)
    config = resolve(parse_any(f"{shape.format(size)} {flags}".split()), 1)
    recipe, mesh = recipe_of(config), Mesh()
    module = recipe.build_model(config, mesh, size.vocabulary, dtype=torch.bfloat16, device="meta")
    optimizer = DistributedOptimizer(module, mesh, Optimizer(), dtype=torch.bfloat16, device="cpu", seed=1)

    def step(arrays: Arrays) -> float:
        sums = module(None, named_batch(arrays, torch.arange(size.batch)))[1]
        loss = sums["lm loss"] + sums.get("sop loss", 0.0)
        loss.backward()
        totals, norm = optimizer.finalize_grads(torch.stack((loss.detach(), sums["tokens"])).double())
        optimizer.step(3e-4, 0.1, min(1.0, totals[1].item() / (norm + 1e-6)) / totals[1].item())
        return (totals[0] / totals[1]).item()

    return step


def hugging_face_model(model: str, size: Size, attention: str) -> torch.nn.Module:
    import transformers

    if model == "t5":
        shape = dict(d_model=size.hidden, d_kv=size.hidden // size.heads, d_ff=size.ffn, num_heads=size.heads)
        shape |= dict(num_layers=size.layers, dropout_rate=0.0, feed_forward_proj="gated-gelu", use_cache=False)
        config = transformers.T5Config(vocab_size=size.vocabulary, tie_word_embeddings=False, **shape)
        kind = transformers.T5ForConditionalGeneration
    else:
        shape = dict(hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=size.heads)
        shape |= dict(intermediate_size=size.ffn, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        config = transformers.BertConfig(vocab_size=size.vocabulary, max_position_embeddings=size.source, **shape)
        kind = transformers.BertForPreTraining
    config._attn_implementation = attention
    return kind(config).train()


def hugging_face(attention: str, half: bool, compiled: bool, model: str, size: Size) -> Callable[[Arrays], float]:
    """A step of transformers' model with fused AdamW. half: weights are bf16, and the optimizer has fp32 ones."""
    module = hugging_face_model(model, size, attention)
    run = torch.compile(module) if compiled else module
    return adamw_step(module, half, not half, lambda arrays: run(**hugging_face_inputs(model, arrays)).loss)


def hugging_face_inputs(model: str, arrays: Arrays) -> Arrays:
    rows = {name: array.t().contiguous() for name, array in arrays.items()}
    labels = rows["labels"].masked_fill(rows["loss_mask"] == 0, -100)
    if model == "t5":
        given = dict(input_ids=rows["text_enc"], attention_mask=rows["enc_mask"], decoder_input_ids=rows["text_dec"])
    else:
        given = dict(input_ids=rows["text"], attention_mask=rows["padding_mask"], token_type_ids=rows["types"])
        given["next_sentence_label"] = arrays["is_random"]
    return given | dict(labels=labels)


CONTENDERS = {"ours": partial(ours, ""), "ours-compiled": partial(ours, "--torch-compile")} | {
    f"hf-{attention}-{weights}{'-compiled' if compiled else ''}": partial(
        hugging_face, attention, weights == "bf16", compiled
    )
    for compiled in (True, False)
    for attention in ("sdpa", "eager")
    for weights in ("bf16", "autocast")
}


def measured(model: str, size: Size, full: bool, names: list[str], warmup: int, rounds: int) -> dict[str, Times]:
    generator = torch.Generator().manual_seed(0)
    steps = {name: CONTENDERS[name](model, size) for name in names}
    times = {name: Times([], []) for name in names}
    for round_ in range(-warmup, rounds):
        arrays = batch_of(model, size, generator, full)
        for name, step in steps.items():
            start, used = time.perf_counter(), cpu_seconds()
            loss = step(arrays)
            if round_ >= 0:
                times[name].wall.append(time.perf_counter() - start)
                times[name].cpu.append(cpu_seconds() - used)
            if round_ == rounds - 1:
                print(f"{name:26s} loss {loss:.4f}", flush=True)
    return times


def report(model: str, size: str, times: dict[str, Times]) -> None:
    """Print a line for each contender, one for the peer that counts, and one of JSON with all of it. Where two are ours,
    the faster one is compared with peers.
    """
    median = {name: statistics.median(of.wall) for name, of in times.items()}
    ours = min((name for name in times if name.startswith("ours")), key=median.get, default=None)
    found = {}
    for name, (wall, cpu) in times.items():
        found[name] = dict(seconds=median[name], best=min(wall), cpu_seconds=statistics.median(cpu))
        line = f"{name:26s} {median[name] * 1e3:8.1f} ms a step (best {min(wall) * 1e3:.1f})"
        line += f", CPU {statistics.median(cpu):.3f} s"
        if ours and not name.startswith("ours"):
            rounds = sorted(theirs / own for own, theirs in zip(times[ours].wall, wall))
            low, high = rounds[len(rounds) // 4], rounds[-1 - len(rounds) // 4]
            in_cpu = statistics.median(theirs / own for own, theirs in zip(times[ours].cpu, cpu))
            found[name] |= dict(ratio=statistics.median(rounds), cpu_ratio=in_cpu)
            line += f": {ours} is {found[name]['ratio']:.2f} x (quartiles {low:.2f} to {high:.2f})"
            line += f", in CPU {in_cpu:.2f} x"
        print(line)
    peers = [name for name in times if "ratio" in found[name]]
    if peers:
        best = min(peers, key=median.get)
        print(f"the best peer is {best}: {ours} is {found[best]['ratio']:.2f} x")
    threads = torch.get_num_threads()
    print(json.dumps(dict(model=model, size=size, threads=threads, torch=torch.__version__, contenders=found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["t5", "bert"], default="t5")
    parser.add_argument("--size", choices=["small", "base"], default="small")
    parser.add_argument("--batch", type=int, help="samples of a micro-batch, instead of the size's")
    parser.add_argument("--full", action="store_true", help="sources without padding")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_memory()
    size = SIZES[arguments.model, arguments.size]
    size = size._replace(batch=arguments.batch or size.batch)
    what = arguments.model, size, arguments.full, arguments.only
    report(arguments.model, arguments.size, measured(*what, arguments.warmup, arguments.rounds))


if __name__ == "__main__":
    main()
