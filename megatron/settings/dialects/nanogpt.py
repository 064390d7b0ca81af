# SPDX-License-Identifier: Apache-2.0
"""nanoGPT's settings: Python configs, and commands with `--key=value`, for `dialects.translate`.

Its words are also recognised where a flag is unknown (MEANT).
"""

from megatron.settings.dialects.table import Default, Dialect, NoEffect

# word -> the flags that it means here
MEANT = dict(
    block_size="--seq-length",
    n_layer="--num-layers",
    n_head="--num-attention-heads",
    n_embd="--hidden-size",
    dropout="--hidden-dropout and --attention-dropout",
    batch_size="--micro-batch-size",
    max_iters="--train-iters",
    learning_rate="--lr",
    beta1="--adam-beta1",
    beta2="--adam-beta2",
    grad_clip="--clip-grad",
    warmup_iters="--lr-warmup-iters",
    out_dir="--save",
    init_from="--load",
    dataset="--data-path",
    compile="--torch-compile",
    dtype="--precision",
    wandb_run_name="--wandb-exp-name",
    eval_only="--skip-train",
)
WORDS = """
=  log_interval eval_iters weight_decay lr_decay_iters min_lr
block_size           --seq-length
n_layer              --num-layers
n_head               --num-attention-heads
n_embd               --hidden-size
bias=false           --disable-bias-linear
max_iters            --train-iters
learning_rate        --lr
beta1                --adam-beta1
beta2                --adam-beta2
grad_clip            --clip-grad
decay_lr=true        --lr-decay-style cosine
decay_lr=false       --lr-decay-style constant
out_dir              --save
eval_only=true       --skip-train
backend              --distributed-backend
device=cpu           --device cpu
dtype=float32        --precision fp32
dtype=bfloat16       --bf16; --amp-level O1
dtype=float16        --fp16; --amp-level O1
compile=true         --torch-compile
-  bias=true init_from=scratch device=cuda
"""
LOST = {
    """token files are made by preprocess_data.py --input FILE --output-prefix P --append-eod; then say
        --data-path P_text_document""".replace("\n       ", ""): "dataset",
    "one device for each rank: torchrun and CUDA_VISIBLE_DEVICES say which": "device",
}
CHANGED = {
    "block_size": "samples cover the text one after the other, in a shuffled order; there windows are drawn at random",
    "bias": "norms keep their bias, which nanoGPT leaves out, too",
    "eval_iters": "batches of the validation part of --split; there also of the training data",
}
BATCH, STEPS = "12", "40"  # what it takes where nothing is said


def micro_batch(words, given):
    """Translate batch_size: of one pass; gradient_accumulation_steps counts those of all ranks together."""
    more = [] if "gradient_accumulation_steps" in given else _global(words[0], STEPS)
    return [("--micro-batch-size", words), *more]


def accumulated(words, given):
    return _global(given["batch_size"].value if "batch_size" in given else BATCH, words[0])


def _global(batch: str, steps: str):
    return [("--global-batch-size", [str(int(batch) * int(steps))])]


def dropout(words, given):
    return [("--hidden-dropout", words), ("--attention-dropout", words)]


def _saves(given) -> bool:
    """Whether each evaluation saves a checkpoint."""
    return "always_save_checkpoint" not in given or given["always_save_checkpoint"].value.lower() != "false"


def evaluations(words, given):
    """Translate eval_interval: checkpoints are saved then, too."""
    return [("--eval-interval", words), *([("--save-interval", words)] if _saves(given) else [])]


def saved(words, given):
    """Translate always_save_checkpoint: false saves the best model of all evaluations only."""
    if _saves(given):
        raise NoEffect("eval_interval says how often")
    raise ValueError("say --save-interval STEPS; finetune.py keeps the best checkpoint, pretraining the newest ones")


def weights(words, given):
    """Translate init_from: resume takes the run's own folder."""
    if words[0] == "resume":
        return [("--load", given["out_dir"].words if "out_dir" in given else ["out"])]
    raise ValueError("python -m megatron.tools.checkpoint from-hf makes a checkpoint of it; then --load DIR --finetune")


def warmup(words, given):
    if "decay_lr" in given and given["decay_lr"].value.lower() == "false":
        raise NoEffect("decay_lr is false, and the learning rate is constant from the first step on")
    return [("--lr-warmup-iters", words)]


def tracked(flag: str):
    """Translate a word of Weights & Biases, which wandb_log switches on."""

    def computed(words, given):
        if "wandb_log" not in given or given["wandb_log"].value.lower() != "true":
            raise NoEffect("wandb_log is not true")
        return [(flag, words)]

    return computed


def tracking(words, given):
    if words[0].lower() == "true" and "wandb_project" not in given:
        return [("--wandb-project", ["owt"])]
    raise NoEffect("wandb_project says where" if words[0].lower() == "true" else "it asks for nothing")


NANOGPT = Dialect(
    "nanogpt",
    "nanoGPT",
    WORDS,
    CHANGED,
    {},
    LOST,
    {
        "batch_size": micro_batch,
        "gradient_accumulation_steps": accumulated,
        "dropout": dropout,
        "eval_interval": evaluations,
        "always_save_checkpoint": saved,
        "init_from": weights,
        "warmup_iters": warmup,
        "wandb_log": tracking,
        "wandb_project": tracked("--wandb-project"),
        "wandb_run_name": tracked("--wandb-exp-name"),
    },
    configs={"": "python"},  # train.py config/train_gpt2.py
    apart=True,
    defaults=(
        Default("--num-layers", "12"),
        Default("--hidden-size", "768"),
        Default("--num-attention-heads", "12"),
        Default("--seq-length", "1024"),
        Default("--hidden-dropout", "0"),
        Default("--attention-dropout", "0"),
        Default("--disable-bias-linear", "true", ("bias",)),
        Default("--bias-gelu-fusion", "false"),
        Default("--micro-batch-size", BATCH),
        Default("--global-batch-size", "480"),
        Default("--train-iters", "600000"),
        Default("--lr", "6e-4"),
        Default("--min-lr", "6e-5", ("decay_lr=false",)),
        Default("--lr-decay-style", "cosine", ("decay_lr=false",)),
        Default("--lr-decay-iters", "600000", ("decay_lr=false",)),
        Default("--lr-warmup-iters", "2000", ("decay_lr=false",)),
        Default("--weight-decay", "0.1"),
        Default("--adam-beta2", "0.95"),
        Default("--eval-interval", "2000"),
        Default("--save-interval", "2000", ("eval_interval", "always_save_checkpoint=false")),
        Default("--eval-iters", "200"),
        Default("--log-interval", "1"),
        Default("--save", "out"),
        Default("--precision", "bf16", ("dtype",)),
        Default("--amp-level", "O1", ("dtype",)),
        Default("--torch-compile", "true", ("compile",)),
        Default("--seed", "1337"),
    ),
    programs=("train.py",),
)
