# SPDX-License-Identifier: Apache-2.0
"""Answers for flags of Megatron-LM (and of its forks) that this suite does not have.

A flag either has no effect here, because the result of training is the same without it, or it is refused with an
alternative. The tables below list both; a name may be a pattern (`--moe-*`), and an exact name wins over a pattern.
`--flag=value` in `NEUTRAL` is a value that asks for nothing, such as one expert group: it is accepted without a note.

    >>> answer("--transformer-impl", ["local"])
    Answer(refused=False, sentence='there is one implementation of the model')
"""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

DATA_FILES = ("--data-args-path", "--per-split-data-args-path")


@dataclass(frozen=True)
class Answer:
    """The answer to a flag. Not refused and without a sentence: the flag asked for nothing."""

    refused: bool
    sentence: str


def answer(flag: str, words: list[str] | tuple[str, ...] = ()) -> Answer | None:
    """The answer for a flag and the words after it; None for an unknown flag."""
    name = flag.replace("_", "-")
    if " ".join(words).lower() == "false" and negation(name) in _REFUSED:  # --drop-last false is --no-drop-last
        return Answer(True, _REFUSED[negation(name)])
    for refused, table in ((False, _IGNORED), (True, _REFUSED)):
        if name in table:
            return _judge(refused, table[name], name, words)
    for refused, table in ((False, _IGNORED), (True, _REFUSED)):
        for pattern, sentence in table.items():
            if "*" in pattern and fnmatchcase(name, pattern):
                return _judge(refused, sentence, name, words)
    # The flag's negation: neither of the two has an effect.
    other = negation(name)
    return _judge(False, _IGNORED[other], name, words) if other in _IGNORED else None


def data_in_file(flag: str, path: str) -> list[tuple[str, list[str]]]:
    """The flags that a file of --data-args-path (the words of --data-path) or --per-split-data-args-path (JSON: the words
    of each split, as a list or a text) stands for. Raises ValueError for other contents, OSError if it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    if flag == DATA_FILES[0]:
        words = {"": text.split()}
    else:
        words = json.loads(text)
        if not isinstance(words, dict) or (
            unknown := [name for name in words if name not in ("train", "valid", "test")]
        ):
            what = f"'{unknown[0]}'" if isinstance(words, dict) else type(words).__name__
            raise ValueError(f'{what} where {{"train": [...], "valid": [...], "test": [...]}} is expected')
        words = {f"{name}-": one.split() if isinstance(one, str) else one or [] for name, one in words.items()}
    found = [(f"--{name}data-path", [str(word) for word in one]) for name, one in words.items() if one]
    if not found:
        raise ValueError("no dataset is in it")
    return found


def negation(name: str) -> str:
    """
    >>> negation("--drop-last"), negation("--no-drop-last")
    ('--no-drop-last', '--drop-last')
    """
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name.removeprefix('--')}"


def known_flags() -> list[str]:
    """Every name in the tables that is no pattern."""
    return [name for name in (*_IGNORED, *_REFUSED) if "*" not in name]


def _judge(refused: bool, sentence: str, name: str, words) -> Answer:
    word = " ".join(words)
    if word.lower() == "false" or (refused and word in ("none", *_NEUTRAL.get(name, ()))):
        return Answer(False, "")
    if name in VALUES and word not in VALUES[name]:
        return Answer(True, f"there is {' and '.join(VALUES[name])}")
    return Answer(refused, sentence)


# A sentence, and indented below it the flags that it answers.
IGNORED = """
# Speed: other arrangements of the same arithmetic.
gradients are added in place anyway
    --enable-addto
state is cut into equal ranges of one buffer, whatever its tensors are
    --shard-strategy
every step has a full batch: samples are counted across epochs
    --drop-last
norms hold their weight, not what it exceeds 1 by: training is the same, because norms have no weight decay
    --apply-layernorm-1p
there is one implementation of the model
    --transformer-impl --use-mcore-models --use-legacy-models
kernels are chosen by what is installed; fused or not, the result is the same
    --muon-use-syrk --use-flashinfer-fused-rope --disable-jit-fuser --fused-residual-rmsnorm
    --use-te-activation-func --use-fused-weighted-squared-relu --use-transformer-engine-op-fuser
    --use-kitchen-attention --kitchen-attention-backend --use-flash-attn-triton
    --tensor-fusion --gdp-cutedsl-kernel
    --disable-symmetric-registration
the formats of moments and gradients, --exp-avg-dtype, --exp-avg-sq-dtype and --main-grads-dtype, need no other flag
    --use-precision-aware-optimizer
two products of one input are two products, with the same result
    --mla-down-proj-fusion
generation with --multi-latent-attention always caches latents
    --cache-mla-latents
--hybrid-layer-pattern lists the kinds of layers, and says it by itself
    --is-hybrid-model
it allows for features that are experimental in Megatron-LM, and changes nothing by itself
    --enable-experimental
gradients are accumulated and reduced in fp32, or in bf16 with --grad-reduce-in-bf16
    --no-gradient-reduce-div-fusion --ddp-reduce-scatter-with-fp32-accumulation
    --ddp-param-name-patterns-for-fp32-local-accumulation --disable-bf16-reduced-precision-matmul
the loss is always computed in chunks, in fp32 (see --cross-entropy-chunk)
    --cross-entropy-fusion-impl --fp16-lm-cross-entropy
CUDA graphs would only save launch time; see --torch-compile
    --enable-cuda-graph --cuda-graph-* --external-cuda-graph --optimizer-cuda-graph
when and how ranks exchange data changes the speed, not the result; this suite arranges it by itself
    --overlap-param-gather-with-optimizer-step
    --overlap-p2p-communication* --no-overlap-p2p-communication --ddp-* --DDP-impl
    --no-contiguous-buffers-in-local-ddp --no-align-* --disable-align-* --no-async-tensor-model-parallel-allreduce
    --disable-async-tensor-model-parallel-allreduce --use-ring-exchange-p2p --no-scatter-gather-tensors-in-pipeline
    --tp-comm-* --no-tp-comm-* --disable-tp-comm-* --defer-embedding-wgrad-compute --wgrad-deferral-limit
    --delay-wgrad-compute --create-all-gather-group --high-priority-* --use-nccl-ub --use-sharp
    --sharp-enabled-group --nccl-communicator-config-path --disable-gloo-process-groups --no-paired-barrier
    --no-pre-communication-optimization --pipeline-model-parallel-comm-backend --suggested-communication-unit-size
    --segment-broadcast-mb --no-data-sharding --no-clone-scatter-output-in-embedding --delay-grad-reduce
    --align-grad-reduce --align-param-gather
    --disable-clone-scatter-output-in-embedding
    --use-layer-wise-* --no-use-layer-wise-*
HybridEP has its own numbers of blocks and of multiprocessors for the order of rows, and needs no padded tokens here
    --moe-hybridep-num-blocks-* --moe-hybridep-num-sms-preprocessing --moe-hybridep-pad-*
how rows of experts are ordered and sent changes the speed, not the result; this suite arranges it by itself
    --moe-shared-expert-overlap --moe-permute-fusion --moe-permute-fusion-into-hybridep --moe-router-fusion
experts are grouped products where these are faster than one product for each
    --moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-use-grouped-tensor --use-grouped-gemm-*
metrics.jsonl has the load of each expert in each layer
    --moe-per-layer-logging
scales of fp8 numbers are those of the numbers themselves, as with Megatron-LM's --fp8-recipe tensorwise
    --fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo --tp-only-amax-red
weights of --fp8-recipe mxfp8 are gathered in the format of --precision
    --reuse-grad-buf-for-mxfp8-param-ag
transposes of fp8 weights are kept until the update, or with --fp8-param-gather made in each backward pass
    --keep-fp8-transpose-cache
padding of experts' tokens is for fp8 products of experts
    --moe-router-padding-for-fp8 --moe-router-padding-for-quantization
ranks are always ordered tensor, context, data, pipeline
    --use-tp-pp-dp-mapping
all ranks collect garbage between the same steps anyway, at evaluations and saves too; see --manual-gc-interval
    --manual-gc --no-manual-gc-eval --disable-manual-gc-eval
memory is kept and freed as torch does by itself
    --empty-unused-memory-level
how far the host may run ahead of the device changes no result
    --train-sync-interval
the interleaved schedule groups micro-batches by itself
    --microbatch-group-size-per-vp-stage --microbatch-group-size-per-virtual-pipeline-stage --interleave-group-size
there is no pipeline unless --pipeline-model-parallel-size is above 1
    --no-pipeline-parallel

# Randomness and initial weights.
randomness is a function of seed and position, so there is no random state to track, save or load
    --no-load-rng --no-save-rng --te-rng-tracker --inference-rng-tracker --use-same-sampling-seed-across-dp-ranks
initial weights depend on --seed and their names alone, wherever they are drawn
    --use-cpu-initialization --no-initialization --perform-initialization --init-model-with-meta-device --lazy-mpu-init
    --init-on-meta
torchrun or srun tells each process its rank and where the first one is (or --rank and --world-size, in several shells)
    --local-rank --rank --from-torch --from-slurm --host --port

# Checkpoints.
checkpoints have one format (safetensors with checksums), written and read in parallel, which every layout loads
    --ckpt-format --dist-ckpt-format --use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-*
    --no-ckpt-fully-parallel-save --disable-ckpt-fully-parallel-save --ckpt-assume-constant-structure
    --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient --use-persistent-ckpt-worker
    --dist-ckpt-workers --dist-ckpt-save-pre-mcore-014 --ckpt-pg-* --ckpt-drop-redundant-extra-state
    --no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity --verify-integrity
    --delta-offload-bytes-across-pp-ranks --async-ckpt-* --save-tokenizer-assets --no-save-tokenizer-assets
    --disable-save-tokenizer-assets --no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
there is one way to save in the background: --async-save
    --async-strategy --async-mode
a layout comes from the flags or --config, and any layout loads what any other wrote
    --use-mp-args-from-checkpoint-args
a tokenizer that flags give wins over the one that --use-checkpoint-args takes from the checkpoint
    --no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args

# Data.
.bin/.idx files are memory-mapped, or read by pread with --no-mmap-bin-files
    --data-impl --mmap-warmup --dataset-impl --lazy-loader
index maps are built once, in seconds, and kept in --data-cache-path
    --num-dataset-builder-threads --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
    --mid-level-dataset-surplus
causal masks are never stored
    --no-create-attention-mask-in-dataloader
the fastest tokenizer whose ids agree is chosen
    --use-gigatoken --legacy-tokenizer
s3:// and other URLs are read wherever a path is; --object-storage-cache-path reads token files by ranges
    --enable-msc --disable-msc

# Logs.
every figure that the run logs goes to TensorBoard as well, at --log-interval
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard
    --log-learning-rate-to-tensorboard --no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard
    --no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard --tensorboard-log-interval
    --tensorboard-queue-size
this figure is not logged yet
    --log-memory-to-tensorboard --log-optimizer-states-to-tensorboard
    --log-world-size-to-tensorboard --log-device-memory-used --log-energy
    --measure-activation-memory
times of ranks are measured from the start, at almost no cost; --log-straggler logs them (--no-straggler-detection: neither)
    --disable-straggler-on-startup --straggler-ctrlr-port
the log has one level; --console and --timing-log-level say what is in it
    --logging-level
--print-config shows every setting, and metrics.jsonl keeps them
    --config-logger-dir
the run reports to no outside service
    --no-one-logger --enable-one-logger --one-logger-* --app-tag-run-* --otel-* --run-workload-inspector-server
wandb reads WANDB_ENTITY and WANDB_DIR from the environment
    --wandb-entity --wandb-save-dir

# Checks.
runs are not compared with each other; see --rerun-mode, --check-replicas-interval and tools.verify_determinism
    --test-mode --enable-exactly-numeric-match --enable-optimizer-post-validation
results that --rerun-mode rejects are events (events.jsonl), with rank and machine
    --result-rejected-tracker-filename
"""

REFUSED = """
# Recomputation, pipeline schedules, offloading and profiling.
say --recompute-granularity full, full_attn or core_attn
    --pp-recompute-interval --recompute-lgd --deepspeed-activation-checkpointing
activations are kept on the device, or computed again; see --recompute-granularity
    --checkpoint-in-cpu
--sequence-parallel divides what is kept among tensor parallel ranks
    --distribute-checkpointed-activations --distribute-saved-activations
see --pipeline-stage-layers
    --allow-padding-num-layers --standalone-embedding-stage
say --pipeline-schedule zb-h1, zb-v or v-half
    --enable-zero-bubble --enable-zb* --zero-bubble-*
say --optimizer-cpu-offload, --optimizer-offload-fraction or --param-cpu-offload; activations are never moved to the host
    --use-torch-optimizer-for-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-* --cpu-offload* --cpu-optimizer --fine-grained-*
    --activation-offload-fraction --offload-* --auto-offload-time --min-offloaded-tensor-size
    --delay-offload-until-cuda-graph
say --profile: torch.profiler writes a trace, tables of operators, communication and memory
    --pytorch-profiler-* --record-* --memory-snapshot-path --nvtx-ranges
--exit-signal-handler catches SIGTERM and SIGUSR1
    --exit-signal*
training is as long as --train-iters or --train-samples say
    --iter-per-epoch

# Sharding and distribution by other means.
use --sharding-stage 3
    --use-megatron-fsdp --use-fsdp2 --use-torch-fsdp2 --use-custom-fsdp --megatron-fsdp-* --fsdp-* --torch-fsdp2-*
    --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp
use --sharding-degree
    --num-distributed-optimizer-instances
this is DeepSpeed's; use --bf16 or --fp16, --sharding-stage and --load here
    --deepspeed* --ds-* --universal-checkpoint
layer dropping and curricula of DeepSpeed are not part of this suite
    --random-ltd --data-efficiency-curriculum-learning
long sequences are split by --context-parallel-size, and --cp-comm-type p2p, allgather, a2a or a2a+p2p
    --hybrid-context-parallel --max-seqlen-per-dp-cp-rank
    --sequence-parallel-size
this is a flag of torchrun: put it before the name of the script; bash scripts take NPROC=N, NNODES=N and the like in front
    --nnodes --nproc-per-node --node-rank --master-addr --master-port --rdzv-* --standalone --max-restarts
weight sharding across recomputation groups is not part of this suite
    --gtp-* --*-num-weight-shards

# Batch, schedule, optimizer.
count in samples: tokens / --seq-length, as --train-samples, --lr-decay-samples, --lr-warmup-samples
    --train-tokens --lr-decay-tokens --lr-warmup-tokens
the batch size does not change with the number of ranks
    --decrease-batch-size-if-needed
embeddings have a learning rate of their own with --decoupled-lr, other parameters share one
    --head-lr-mult
Muon orthogonalises whole matrices in every layout, queries, keys and values apart; other weights have AdamW
    --muon-tp-mode --muon-no-split-qkv --muon-scalar-optimizer
the optimizers are those of --optimizer
    --soap-*
main weights are fp32, because fp16 loses small updates: say fp32, or leave it out
    --main-params-dtype
a checkpoint is loaded with the fp32 weights and the state of its optimizer, or by --no-load-optim without that state
    --load-main-params-from-ckpt
weight decay applies to matrices, not to biases and norms
    --apply-wd-to-qk-layernorm --no-weight-decay-cond-type --dump-param-to-param-group-map
spikes of loss and gradient norm are always watched; see --on-spike
    --check-for-spiky-loss --check-for-large-grads
every iteration is of one phase
    --phase-transition-iterations
to start from loaded weights at iteration 0, use --finetune
    --reset-iteration --no-load-lr-state

# Evaluation.
evaluation uses the training batch, --eval-iters of it each --eval-interval
    --eval-global-batch-size --eval-micro-batch-size --multiple-validation-sets
    --validation-set-names --start-eval-at-iter

# Model.
--overlap-moe-expert-parallel-comm overlaps the exchanges of a forward pass with a backward pass, and the other way round
    --overlap-dispatch-* --ep-overlap-*
experts have the hidden size of their input, and router and dispatch are those of docs/experts.md
    --moe-* --expert-tensor-parallel-num-weight-shards --mlp-type --topk
the load of each expert is in metrics.jsonl
    --save-tokens-per-expert-interval
attention is multi-head, grouped-query (--group-query-attention) or multi-latent (--multi-latent-attention)
    --dsa-* --no-dsa-* --disable-dsa-* --gdp-* --qk-l2-norm
say --model-name-or-path gpt-oss-20b, which sets the whole shape
    --enable-gpt-oss
layers are listed by --hybrid-layer-pattern; --mamba-state-dim, -head-dim, -num-heads, -num-groups size those of Mamba-2
    --hybrid-* --mamba-* --disable-mamba-mem-eff-path
attention and the output layer stay in the format of --precision; --fp8-format is for linear layers of blocks
    --fp8-output-proj --fp8-dot-product-attention --fp8-multi-head-attention
say --fp8-format with --fp8-recipe tensorwise, blockwise or mxfp8
    --fp8-* --fp4-*
layers with fp8 products are chosen by --fp8-layers and --fp8-skip
    --te-precision-config-file
residuals and embeddings have the format of --precision
    --fp32-residual-connection --embedding-weights-in-fp32
leave out --no-bias-gelu-fusion: the tanh form is this suite's default
    --openai-gelu
the MLP has GeLU (tanh, or erf with --no-bias-gelu-fusion), --squared-relu, --swiglu, --geglu or --quick-geglu
    --onnx-safe
rotary positions rotate halves, as Llama does
    --rotary-interleaved --mrope-section --relative-attention-*
weights start from N(0, --init-method-std), output layers scaled by depth
    --init-method-xavier-uniform --embedding-init-method-std --data-parallel-random-init --use-mup --mup-*
residuals are added to what the norm before them read; see --norm-position
    --apply-residual-connection-post-layernorm
all layers of a kind are alike
    --mhc-* --enable-mhc-connections --freeze-all-layers
a model of your own is a module with a function recipe(): --model-type MODULE, docs/extending.md
    --spec
depths of --mtp-num-layers read the states of the one before, on the last stage
    --mtp-hsm --mtp-standalone
write the layers of each depth after a / in --hybrid-layer-pattern, as in *-*-/*-/*-
    --mtp-hybrid-override-pattern
the vocabulary is padded to a multiple of --make-vocab-size-divisible-by
    --padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size
encoder-decoders are trained by pretrain_t5.py
    --encoder-num-layers --decoder-num-layers --decoder-seq-length --pipeline-model-parallel-split-rank
    --encoder-pipeline-model-parallel-size
encoder and decoder have one size of each parallel axis but the pipeline's
    --encoder-tensor-model-parallel-size --encoder-context-parallel-size

# Other recipes.
masked language models are trained by pretrain_bert.py and pretrain_t5.py
    --mask-* --short-seq-prob
BERT is trained by pretrain_bert.py
    --bert-* --num-tokentypes --output-bert-embeddings
fill-in-the-middle is not part of this suite
    --fim-*
conversations are learned by finetune.py --task chat (docs/chat.md)
    --sft* --chat-template
reinforcement learning is not part of this suite
    --rl-* --no-rl-* --grpo-* --langrl-* --no-langrl-* --perform-rl-step --refit-method
retrieval models are not part of this suite
    --retro-* --retriever-* --ict-* --biencoder-* --block-data-path --embedding-path --evidence-data-path
    --indexer-* --query-in-block-prob --titles-data-path --use-one-sent-docs --bert-load --bert-embedder-type
vision models are not part of this suite
    --vision-* --dino-* --swin-* --img-* --patch-dim --num-channels --num-classes --classes-fraction
    --data-per-class-fraction --sample-rate --mask-type --mask-factor
distillation is --teacher-load DIR, with the settings of the teacher's checkpoint, --kd-alpha and --kd-temperature
    --kd* --*-teacher --export-kd-cfg --load-teacher
teachers' logits are stored by python -m megatron.tools.teacher_logits, and read with --teacher-logits
    --logits-* --output-logit-dtype
a trained model is pruned by megatron.tools.prune, and quantized by megatron.tools.checkpoint quantize, without ModelOpt
    --export-* --modelopt-*

# Text generation.
this belongs to text generation: python -m megatron.tools.generate --help
    --inference-* --no-inference-* --prompts --prompt-file* --top-k --top-p --top-n-logprobs --temperature
    --stop-words --num-tokens-to-generate --return-log-probs --incoming-requests-* --output-path
    --output-every-n-results --termination-id --max-tokens-to-oom --flash-decode --enable-chunked-prefill
    --disable-chunked-prefill --use-legacy-static-engine --use-coordinator --num-speculative-tokens
    --decode-only-cuda-graphs --symmetric-ar-type --nccl-all-reduce-for-prefill --mlp-chunks-for-*
    --batch-invariant-backend --cache-dir

# Data and tokenizers.
every step has a full batch, across epochs; --full-validation evaluates the last part too
    --no-drop-last
say --data-path, or --train-data-path, --valid-data-path and --test-data-path; long lists go into --config FILE.yaml
    --per-dataset-sequences-path --train-data --train-doc-idx-path
    --train-sample-idx-path --train-shuffle-idx-path --num-tokens-from-file
the document boundary of NullTokenizer is --vocab-size
    --null-tokenizer-eod-id --null-tokenizer-pad-id
a tokenizer's files say this themselves
    --tiktoken-* --tokenizer-* --no-tokenizer-* --disable-tokenizer-* --allow-ambiguous-pad-tokens
code from a model's folder is never run
    --trust-remote-code
documents are separated by --reset-attention-mask and --reset-position-ids
    --dataloader-inter-document-masking

# Checkpoints and failures.
use --config FILE.yaml
    --yaml-cfg
use --load, with --ckpt-step for a certain step
    --override-ckpt-iteration
there is one kind of checkpoint: --save, --save-interval
    --ckpt-convert-* --save-activations-interval --save-dgrads-interval --save-params-interval --save-wgrads-interval
snapshots lie in the memory of the nodes; on a shared disk, --save-interval with --keep-last keeps the newest checkpoints
    --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
each rank writes its share of what several ranks hold, as Megatron-LM's fully_parallel does
    --non-persistent-local-ckpt-algo
restarting inside the process and injecting lost ranks are not part of this suite
    --inprocess-* --enable-ft-package --calc-ft-timeouts --ft-* --fault-injector-*
    --gpu-sniff-test-interval
see --flight-recorder-dump-path: dumps are written at every hang and timeout, with all entries
    --flight-recorder-include-* --no-flight-recorder-* --disable-flight-recorder-*
a job that is taken away goes back into the queue by python -m megatron.tools.supervise --on-preempt requeue
    --adlr-autoresume*
see --distributed-timeout-minutes
    --distributed-timeout-seconds-after-init --fake-process-group --throughput-check-only
"""

# The values of flags that have no effect, whatever they say.
VALUES = {"--shard-strategy": ("tensor", "bucket")}

# Values that ask for nothing.
NEUTRAL = """
--main-params-dtype=fp32
--num-distributed-optimizer-instances=1
--non-persistent-ckpt-type=local --non-persistent-ckpt-type=in_memory --non-persistent-local-ckpt-algo=fully_parallel
--pp-recompute-interval=1 --nnodes=1 --inference-max-requests=8
"""


# Megatron-LM's values that have another name here, and that name.
INSTEAD = {
    "fp8": "fp8 is for products of linear layers (--fp8-format): say bf16",
    "fp16": "fp16 would need a scale for each tensor: say bf16, which has the range of fp32",
    "O3": "half precision for weights and optimizer alone loses small updates: say O2, which keeps fp32 ones beside them",
    "shared_experts": "say mlp, which recomputes experts and shared experts",
    "Llama3Tokenizer": "say TikTokenizer for its tokenizer.model, HuggingFaceTokenizer for a tokenizer.json",
}


def sentences(table: str) -> dict[str, list[str]]:
    """Parse a table into sentence -> names."""
    result: dict[str, list[str]] = {}
    sentence = ""
    for line in table.splitlines():
        if line.startswith(" "):
            result[sentence] += line.split()
        elif line and not line.startswith("#"):
            sentence = line
            result[sentence] = []
    return result


def _by_name(table: str) -> dict[str, str]:
    return {name: sentence for sentence, names in sentences(table).items() for name in names}


_IGNORED, _REFUSED = _by_name(IGNORED), _by_name(REFUSED)
_NEUTRAL: dict[str, list[str]] = {}
for _pair in NEUTRAL.split():
    _NEUTRAL.setdefault(_pair.partition("=")[0], []).append(_pair.partition("=")[2])
# The layers of a pattern, which it lists itself.
_NEUTRAL["--spec"] = [
    f"megatron.core.models.{kind}.{kind}_layer_specs {kind}_stack_spec" for kind in ("mamba", "hybrid")
]
