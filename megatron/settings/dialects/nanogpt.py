# SPDX-License-Identifier: Apache-2.0
"""nanoGPT's words, which are recognised where a flag is unknown."""

# word -> the flags that it means here
NANOGPT = dict(
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
