# SPDX-License-Identifier: Apache-2.0
"""One training step of our T5 1.1 and BERT against Hugging Face's of the same shape, in one process, taking turns.

    python benchmarks/encoder_decoder.py --model t5
    python benchmarks/encoder_decoder.py --model bert --rounds 12 --only ours hf-compiled

A step is forward, backward, clipping and AdamW on fp32 weights in bf16 arithmetic (theirs by autocast, fused AdamW, eager
or compiled), without dropout. A sixth of the tokens of sources fills up; 15 % of BERT's are masked. Every round runs one
step of each contender; a ratio is the median over rounds of (time of the peer / time of ours).
"""

import argparse
import json
import statistics
import time

import torch

from megatron.data.loader import named_batch
from megatron.fused_kernels.cpu import keep_memory
from megatron.model.recipe import parse_any, recipe_of
from megatron.mpu.mesh import Mesh
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings.schema import Optimizer
from megatron.training.rules import resolve

LAYERS, HIDDEN, HEADS, FFN, V, B = 4, 256, 4, 1024, 8192, 16
SOURCE, TARGET = 256, 64
SHARED = f"""--hidden-size {HIDDEN} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} --seq-length {SOURCE} --mock-data
    --vocab-size {V} --make-vocab-size-divisible-by 1 --micro-batch-size {B} --train-iters 1 --lr 1e-3 --device cpu
    --precision bf16 --hidden-dropout 0 --attention-dropout 0"""
T5 = f"""--model-type T5 --encoder-num-layers {LAYERS} --decoder-num-layers {LAYERS} --decoder-seq-length {TARGET}
    --position-embedding-type relative --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
    --unscaled-attention --feed-forward-proj gated-gelu --untie-embeddings-and-output-weights"""
BERT = f"--model-type BERT --num-layers {LAYERS} --post-norm --norm-epsilon 1e-12"


def batch_of(model: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Arrays of a micro-batch, sequence first."""
    draw = lambda *shape: torch.randint(1, V, shape, generator=generator)
    mask = (torch.arange(SOURCE).unsqueeze(1) < SOURCE - SOURCE // 3 * (torch.arange(B) % 2)).long()
    if model == "t5":
        arrays = dict(text_enc=draw(SOURCE, B), text_dec=draw(TARGET, B), labels=draw(TARGET, B))
        return arrays | dict(loss_mask=torch.ones(TARGET, B), enc_mask=mask, dec_mask=torch.ones(TARGET, B).long())
    masked = (torch.rand(SOURCE, B, generator=generator) < 0.15) & (mask > 0)
    arrays = dict(text=draw(SOURCE, B), types=torch.zeros(SOURCE, B).long(), labels=draw(SOURCE, B))
    return arrays | dict(is_random=torch.arange(B) % 2, loss_mask=masked.float(), padding_mask=mask)


def ours(model: str):
    """A step function of the suite's own model and optimizer."""
    config = resolve(parse_any(f"{SHARED} {T5 if model == 't5' else BERT}".split()), 1)
    recipe, mesh = recipe_of(config), Mesh()
    module = recipe.build_model(config, mesh, V, dtype=torch.bfloat16, device="meta")
    optimizer = DistributedOptimizer(module, mesh, Optimizer(), dtype=torch.bfloat16, device="cpu", seed=1)

    def step(arrays: dict[str, torch.Tensor]) -> float:
        sums = module(None, named_batch(arrays, torch.arange(B)))[1]
        loss = sums["lm loss"] + sums.get("sop loss", 0.0)
        loss.backward()
        totals, norm = optimizer.finalize_grads(torch.stack((loss.detach(), sums["tokens"])).double())
        optimizer.step(3e-4, 0.1, min(1.0, totals[1].item() / (norm + 1e-6)) / totals[1].item())
        return (totals[0] / totals[1]).item()

    return step


def hugging_face(model: str, compiled: bool):
    """A step function of transformers' model with fused AdamW."""
    import transformers

    if model == "t5":
        shape = dict(
            d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=FFN, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0
        )
        config = transformers.T5Config(vocab_size=V, feed_forward_proj="gated-gelu", use_cache=False, **shape)
        module = transformers.T5ForConditionalGeneration(config)
    else:
        shape = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FFN)
        drops = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        config = transformers.BertConfig(vocab_size=V, max_position_embeddings=SOURCE, **shape, **drops)
        module = transformers.BertForPreTraining(config)
    parameters = list(module.train().parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, fused=True)
    run = torch.compile(module) if compiled else module

    def step(arrays: dict[str, torch.Tensor]) -> float:
        rows = {name: array.t().contiguous() for name, array in arrays.items()}
        labels = rows["labels"].masked_fill(rows["loss_mask"] == 0, -100)
        if model == "t5":
            given = dict(
                input_ids=rows["text_enc"], attention_mask=rows["enc_mask"], decoder_input_ids=rows["text_dec"]
            )
        else:
            given = dict(input_ids=rows["text"], attention_mask=rows["padding_mask"], token_type_ids=rows["types"])
            given["next_sentence_label"] = arrays["is_random"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(labels=labels, **given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


CONTENDERS = {
    "ours": ours,
    "hf": lambda model: hugging_face(model, False),
    "hf-compiled": lambda model: hugging_face(model, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["t5", "bert"], default="t5")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    keep_memory()
    generator = torch.Generator().manual_seed(0)
    steps = {name: CONTENDERS[name](arguments.model) for name in arguments.only}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(-arguments.warmup, arguments.rounds):
        arrays = batch_of(arguments.model, generator)
        for name, step in steps.items():
            start = time.perf_counter()
            loss = step(arrays)
            if round_ >= 0:
                times[name].append(time.perf_counter() - start)
            if round_ == arguments.rounds - 1:
                print(f"{name:12s} loss {loss:.4f}", flush=True)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, median in medians.items():
        print(f"{name:12s} {median * 1e3:8.1f} ms a step (best {min(times[name]) * 1e3:.1f})")
    ratios = {}
    for peer in (name for name in times if name != "ours" and "ours" in times):
        rounds = sorted(theirs / own for own, theirs in zip(times["ours"], times[peer]))
        ratios[peer] = statistics.median(rounds)
        low, high = rounds[len(rounds) // 4], rounds[-1 - len(rounds) // 4]
        print(f"ours is {ratios[peer]:.2f} x {peer} (quartiles {low:.2f} to {high:.2f})")
    print(
        json.dumps(dict(model=arguments.model, threads=torch.get_num_threads(), torch=torch.__version__, ratios=ratios))
    )


if __name__ == "__main__":
    main()
