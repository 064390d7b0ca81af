# SPDX-License-Identifier: Apache-2.0
"""The planner's ledgers against runs: bytes of state and bytes of every collective, exactly, layout by layout."""

import contextlib
import os
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megatron.model.recipe import facts_of, recipe_of
from megatron.mpu.forked import run_ranks
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import on_disk, state
from megatron.planner.parity import laid_out, parse_layout
from megatron.planner.traffic import totals, transfers
from megatron.settings.parse import parse_pretrain
from megatron.training.rules import resolve

GPT = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --global-batch-size 8 --train-iters 10 --eval-iters 1 --micro-batch-size 1
    --make-vocab-size-divisible-by 8"""
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = f"""{PLAIN} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm
    --untie-embeddings-and-output-weights"""

GDN = f"""{PLAIN} --experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 4
    --linear-num-value-heads 8 --linear-key-head-dim 8 --linear-value-head-dim 8 --attention-output-gate"""
LATENT = f"""{PLAIN} --multi-latent-attention --position-embedding-type rope --normalization RMSNorm --qk-layernorm
    --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"""
# Of groups and key heads that ranks of cp cannot divide: they pass states on
STATES = f"""{PLAIN} --hybrid-layer-pattern M*GM --linear-num-key-heads 2 --linear-num-value-heads 4
    --linear-key-head-dim 8 --linear-value-head-dim 6 --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8"""
IN_FP8 = "--hidden-size 128 --bf16 --fp8-format e4m3 --fp8-param-gather"
MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"

ADAPTERS = "--lora-rank 4 --train-only *.lora_* embedding.word.*"
AHEAD = "--mtp-num-layers 2"
ORDERED, LONGER = "--batch-invariant-mode", "--seq-length 128 --hidden-size 64"
CASES = [
    ("", AHEAD),
    ("tp2", f"{AHEAD} --recompute-granularity full"),
    ("tp2sp", f"{LLAMA} {AHEAD}"),
    ("pp2", f"{LLAMA} {AHEAD}"),
    ("pp2-tp2sp-zbh1", f"{LLAMA} {AHEAD}"),
    ("dp2-zero3", f"{LLAMA} {AHEAD} --recompute-granularity full"),
    ("", ""),
    ("", LLAMA),
    ("tp2", ""),
    ("tp2sp", ""),
    ("tp2", "--recompute-granularity full"),
    ("tp2", f"{PLAIN} --recompute-granularity full"),
    ("tp2sp", f"{PLAIN} --recompute-granularity full --recompute-num-layers 2"),
    ("tp2sp", "--recompute-granularity full_attn --no-recompute-layers 1"),
    ("tp2sp", f"{LLAMA} --micro-batch-size 2"),
    ("tp2", "--recompute-granularity core_attn"),
    ("tp2sp", "--recompute-granularity selective --recompute-modules core_attn layernorm mlp_act"),
    ("tp2sp", f"{PLAIN} --recompute-granularity selective --recompute-modules layernorm mlp"),
    ("tp2", "--recompute-granularity selective --recompute-modules mlp"),
    ("tp4sp", ""),
    ("tp2sp", f"{PLAIN} --squared-relu --window-size 5,0 --window-attn-skip-freq 2 --attn-logit-softcapping 2"),
    ("dp2-zero2", "--z-loss-coeff 0.1 --final-logit-softcapping 9"),
    ("dp2", ""),
    ("dp2-zero1", "--bf16"),
    ("dp2-zero2", "--bf16 --amp-level O1"),
    ("dp2-zero2", f"{LLAMA} --bf16"),
    ("dp2-zero3", "--bf16"),
    ("dp2-zero3", LLAMA),
    ("dp2-zero3", "--recompute-granularity full --recompute-num-layers 2"),
    ("dp4-zero3", "--sharding-degree 2"),
    ("dp4-zero1", "--sharding-degree 2 --bf16"),
    ("dp2-zero1", "--overlap-grad-reduce --overlap-param-gather"),
    ("dp2-zero3", "--overlap-grad-reduce --overlap-param-gather --bf16"),
    ("dp2-zero1", "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --bf16"),
    ("dp2-zero2", "--nvme-offload-fraction 0.5 --nvme-offload-dir . --bf16"),
    ("dp2-zero3", "--nvme-offload-fraction 0.7 --nvme-offload-dir . --optimizer-cpu-offload"),
    ("", "--optimizer sgd --sgd-momentum 0 --bf16"),
    ("dp2-zero2", "--optimizer sgd --nvme-offload-fraction 0.5 --nvme-offload-dir ."),
    ("dp2-zero1", "--optimizer lion --nvme-offload-fraction 0.3 --nvme-offload-dir . --optimizer-cpu-offload --bf16"),
    ("", f"{MOMENTS} --bf16"),
    ("dp2", f"{MOMENTS} --grad-reduce-in-bf16"),
    ("dp2-zero1", "--exp-avg-dtype bf16 --grad-reduce-in-bf16 --bf16"),
    ("dp2-zero2", "--exp-avg-sq-dtype bf16 --grad-reduce-in-bf16 --bf16"),
    ("dp4-zero2", f"{MOMENTS} --main-grads-dtype bf16 --bf16 --sharding-degree 2"),
    ("dp4-zero3", f"{MOMENTS} --grad-reduce-in-bf16 --bf16 --sharding-degree 2"),
    ("tp2sp-pp2-dp2-zero3", f"{MOMENTS} --main-grads-dtype bf16"),
    ("dp2-zero1", f"{MOMENTS} --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --grad-reduce-in-bf16"),
    ("dp2-zero2", "--nvme-offload-fraction 0.5 --nvme-offload-dir . --exp-avg-dtype bf16 --bf16"),
    ("dp2-zero1", f"{MOMENTS} --main-grads-dtype bf16 --optimizer muon"),
    ("", f"{LLAMA} --optimizer muon --bf16"),
    ("tp2sp-pp2-dp2-zero1", "--optimizer muon --bf16"),
    ("dp4-zero3", f"{LLAMA} --optimizer muon --sharding-degree 2"),
    # Weights alone of what is frozen; the embedding is trained, so that no message falls away.
    ("dp2", "--freeze blocks.*.mlp.* *norm*"),
    ("dp2-zero1", "--freeze blocks.1.* *.bias --bf16"),
    ("dp2-zero3", "--freeze blocks.1.* *.bias final_norm.* --bf16"),
    ("dp2-zero3", "--train-only embedding.word.* blocks.[02].attention.* --recompute-granularity full"),
    ("pp2-dp2-zero1", "--freeze blocks.[23].* final_norm.* --bf16 --optimizer muon"),
    # Pairs of LoRA beside a frozen base.
    ("tp2sp", f"--linear *=lora {ADAPTERS}"),
    ("tp2", f"--linear attention.output=lora,mlp.up=lora --lora-split-fused {ADAPTERS} {LLAMA}"),
    ("dp2-zero3", f"--linear attention.*=lora {ADAPTERS} --bf16"),
    ("tp2sp-pp2-dp2-zero1", f"--linear *=lora --lora-dropout 0.1 {ADAPTERS} --bf16"),
    ("pp2", LLAMA),
    ("pp2vp2", ""),
    ("pp2-gpipe", "--bf16"),
    ("pp2-zbh1", "--recompute-granularity selective --recompute-modules layernorm mlp"),
    ("pp2-zbv", ""),
    ("pp2-dp2-zero2", ""),
    ("pp2-dp2-zero3-zbv", ""),
    ("tp2sp-pp2-dp2-zero1", ""),
    ("tp2-pp2-zbh1", PLAIN),
    ("pp2vp2-dp2-zero2-gpipe", "--bf16"),
    ("pp4", "--pipeline-stage-layers 0,2,2,0"),
    ("cp2", LLAMA),
    ("cp2-zero1", "--recompute-granularity core_attn"),
    ("cp2a2a-zero2", f"{LLAMA} --recompute-granularity full --bf16"),
    ("tp2sp-cp2-zero3", PLAIN),
    ("cp2-dp2-zero1", "--sharding-degree 1"),
    ("cp2", f"{PLAIN} --attention-backend sdpa --window-size 5,0 --window-attn-skip-freq 2"),
    ("cp2gather", f"{PLAIN} --attention-backend sdpa --window-size 5,0 --window-attn-skip-freq 2"),
    ("cp2gather-zero1", "--recompute-granularity core_attn"),
    ("cp2gather-tp2sp-zero3", PLAIN),
    ("cp4a2a2", f"{LLAMA} --recompute-granularity full_attn --bf16"),
    ("cp4-zero1", f"{LLAMA} --recompute-granularity full"),
    ("cp4", f"{PLAIN} --window-size 1,0 --window-attn-skip-freq 2"),
    # Gated delta nets: exact weights beside bf16 ones, rows exchanged for heads.
    ("tp2", f"{GDN} --bf16"),
    ("dp2-zero1", f"{GDN} --bf16"),
    ("dp2-zero3", f"{GDN} --bf16 --recompute-granularity full"),
    ("dp2-zero3", f"{GDN} --bf16 --freeze *.A_log blocks.1.* --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    ("tp2sp-cp2-zero3", f"{GDN} --recompute-granularity core_attn"),
    ("pp2-dp2-zero2", f"{GDN} --bf16 --optimizer muon"),
    ("cp2gather", f"{LATENT} --attention-backend sdpa"),
    ("tp2-cp2gather", f"{LATENT} --recompute-granularity selective --recompute-modules core_attn mla_up_proj"),
    ("tp2sp-cp2gather-zero1", f"{LATENT} --q-lora-rank 12 --micro-batch-size 2"),
    ("tp2sp-cp2gather", f"{LATENT} --recompute-granularity full"),
    ("tp2sp-cp2", f"{STATES} --recompute-granularity core_attn"),
    ("cp4gather", f"{STATES} --linear-conv-kernel-dim 1 --micro-batch-size 2"),
    ("cp4a2a2-zero1", f"{STATES} --linear-num-key-heads 6 --linear-num-value-heads 6 --bf16"),
    # Weights that are kept and gathered in fp8.
    ("", f"{IN_FP8} --swiglu"),
    ("dp2-zero1", f"{IN_FP8} --overlap-grad-reduce --overlap-param-gather --first-last-layers-bf16"),
    ("dp2-zero3", f"{IN_FP8} --recompute-granularity full"),
    ("tp2-dp2-zero2", f"{IN_FP8} {LLAMA} --group-query-attention --num-query-groups 2"),
    ("pp2-dp2-zero3", f"{IN_FP8} --fp8-recipe blockwise --freeze blocks.1.mlp.* *.bias"),
    ("dp2-zero1", f"{IN_FP8} --optimizer muon"),
    ("pp2-dp2-zero3", f"{IN_FP8} {LLAMA} {AHEAD}"),
    ("dp2-zero2", f"{IN_FP8} --fp8-recipe blockwise --optimizer-cpu-offload --optimizer-offload-fraction 0.5"),
    # Sums of one order: gradients are reduced after each pass, of both uses of a table.
    ("", ORDERED),
    ("dp2", f"{ORDERED} --bf16"),
    ("dp4-zero1", f"{ORDERED} --sharding-degree 2 --bf16 --grad-reduce-in-bf16"),
    ("dp2-zero3", f"{ORDERED} --untie-embeddings-and-output-weights --bf16"),
    ("tp2sp-dp2-zero2", f"{ORDERED} {LLAMA}"),
    ("tp2-pp2-zbv", f"{ORDERED} --bf16 --qk-layernorm --label-smoothing 0.1 --softmax-type learnable"),
    ("pp2-dp2-zero1-zbh1", ORDERED),
    ("pp2-dp2-zero2-zbv", f"{ORDERED} --bf16"),
    ("cp2a2a", f"{ORDERED} {LONGER} --bf16"),
    ("tp2sp-cp2a2a-zero3", f"{ORDERED} {LONGER} {LLAMA} --qk-layernorm-across-heads"),
    ("pp2-cp2a2a-zero1-zbh1", f"{ORDERED} {LONGER} --swiglu --untie-embeddings-and-output-weights"),
]


def settings_of(case):
    """Resolved settings and number of ranks."""
    layout, config = parse_layout(case[0]), parse_pretrain(f"{GPT} {case[1]}".split())
    settings = laid_out(config, layout)
    parallel = replace(settings.parallel, sharding_degree=config.parallel.sharding_degree)
    settings = replace(settings, parallel=parallel, optimizer=config.optimizer)
    return resolve(settings, layout.world_size), layout.world_size


@pytest.fixture(scope="module")
def found_on(request):
    """`found_on(world)`: {case: what each rank found} of the cases of as many ranks that run, in one set of processes."""
    run = [
        item for item in request.session.items if item.path == Path(__file__) and not item.get_closest_marker("skip")
    ]
    cases = [item.callspec.params["case"] for item in run]
    return cache(lambda world: found_in([case for case in cases if parse_layout(case[0]).world_size == world], world))


def found_in(cases, world):
    settings = [settings_of(case)[0] for case in cases]
    answers = run_ranks(world, lambda rank: list(map(counted_step(), settings)), timeout=300)
    return {case: list(ranks) for case, *ranks in zip(cases, *answers, strict=True)}


def counted_step():
    """A function of settings: (place in the mesh, bytes of state, of its files, {(op, axis): bytes} of a training step)."""
    from megatron.mpu import collectives
    from megatron.pipeline.wire import P2PCommunicator
    from megatron.training.build import build_run
    from megatron.training.step import train_step

    sent, send, inside = Counter(), P2PCommunicator.send, []

    def counting(name, op, of):
        real = getattr(collectives, name)

        def counted(*args, **kwargs):
            axis = next(arg for arg in [*args, *kwargs.values()] if hasattr(arg, "ranks"))
            if axis.size > 1 and not inside:
                sent[op, axis.name] += of(axis.size, args)
            inside.append(name)  # one of these functions may call another
            try:
                return real(*args, **kwargs)
            finally:
                inside.pop()

        setattr(collectives, name, counted)

    def counted_send(self, x, to, *args):
        sent["send", "pp"] += x.nbytes if to != self.axis.rank else 0
        return send(self, x, to, *args)

    counting("all_reduce", "all_reduce", lambda n, args: args[0].nbytes)
    counting("all_gather", "all_gather", lambda n, args: n * args[0].nbytes)
    counting("reduce_scatter", "reduce_scatter", lambda n, args: args[0].nbytes)
    counting("all_to_all", "all_to_all", lambda n, args: args[0].nbytes)
    counting("start_all_reduce", "all_reduce", lambda n, args: args[0].nbytes)
    counting("start_all_gather", "all_gather", lambda n, args: args[0].nbytes)
    counting("start_reduce_scatter", "reduce_scatter", lambda n, args: args[1].nbytes)
    counting("start_all_to_all", "all_to_all", lambda n, args: args[1].nbytes)
    counting("start_shift", "shift", lambda n, args: args[0].nbytes * (args[2] % n > 0))
    P2PCommunicator.send = counted_send

    def step(config):
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            run = build_run(config, recipe_of(config))
            for stage in run.stages:
                stage.train()
            sent.clear()
            train_step(run)
            run.optimizer.weights.end_step()  # what the last update has begun to gather
            run.close()
        seen = {key: size for key, size in sent.items() if size and key[1] not in ("world", "dp")}
        files = sum(getattr(part, "on_disk", 0) for part in run.optimizer.states)
        return run.context.mesh.coordinates, run.optimizer.memory(), files, seen

    return step


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES, ids=[" ".join(case).strip() or "one" for case in CASES])
def test_ledgers_are_exact(case, found_on):
    config, world = settings_of(case)
    layout, job = (
        Layout.of(config, world),
        Job.of(config, facts_of(config, config.tokenizer.vocab_size + 1), dp=world, device="cpu"),
    )
    for place, memory, files, sent in found_on(world)[case]:
        held, _ = state(job, layout, place["pp"], place)
        # Main weights that are parameters too are counted twice; there are as many of them as of gradients.
        apart, gradient = (
            held["main weights"] or held.get("offloaded optimizer state"),
            job.shard_gradients(layout.zero),
        )
        shared = 0 if apart else 4 * memory["gradients"] // gradient
        assert sum(held.values()) - _arriving(held, job, gradient) == sum(memory.values()) - shared, (
            place,
            held,
            memory,
        )
        assert on_disk(job, layout, place["pp"]) == files and bool(files) == ("nvme" in case[1])
        assert totals(transfers(job, layout, place["pp"], place)) == sent, place


def _arriving(held, job, gradient):
    """Gradients on their way to the host, which the optimizer does not count as state."""
    return gradient * held.get("offloaded optimizer state", 0) // (4 + gradient + sum(job.moments))
