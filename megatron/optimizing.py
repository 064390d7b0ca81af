# SPDX-License-Identifier: Apache-2.0
"""Settings of the optimizer: AdamW, its schedules, and where its state is kept."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.setting import setting


@dataclass(frozen=True)
class Optimizer:
    """AdamW, its learning rate and its weight decay."""

    optimizer: Literal["adam", "cpu_adam"] = setting(
        "adam is AdamW, as in Megatron-LM, for each part of the state where that lies; cpu_adam: with "
        "--optimizer-cpu-offload",
        "adam",
        also=dict(adamw="adam", fused_adam="adam", hybrid_adam="adam"),
    )
    lr: Optional[float] = setting("highest learning rate", None, "--max-lr", "--learning-rate")
    min_lr: float = setting("lowest learning rate", 0.0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = setting(
        "curve after warm-up", "linear", also=dict(none="constant")
    )
    lr_decay_iters: Optional[int] = setting("steps until --min-lr (default: all)", None, "--decay-steps")
    lr_decay_samples: Optional[int] = setting("the same in samples", None)
    lr_warmup_iters: int = setting("steps of linear warm-up", 0)
    lr_warmup_samples: int = setting("the same in samples", 0)
    lr_warmup_fraction: Optional[float] = setting(
        "the same as a share of the decay length", None, "--warmup-rate", "--warmup"
    )
    lr_warmup_init: float = setting("learning rate where warm-up starts", 0.0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "how WSD anneals", "exponential"
    )
    lr_wsd_decay_iters: Optional[int] = setting("steps of WSD's annealing", None)
    lr_wsd_decay_samples: Optional[int] = setting("the same in samples", None)
    weight_decay: float = setting("decoupled weight decay of matrices", 0.01)
    start_weight_decay: Optional[float] = setting("weight decay at the start (with --weight-decay-incr-style)", None)
    end_weight_decay: Optional[float] = setting("weight decay at the end", None)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting("curve between the two", "constant")
    clip_grad: float = setting("largest global gradient norm; 0 is off", 1.0, "--grad-clip")
    adam_beta1: float = setting("first moment's decay", 0.9)
    adam_beta2: float = setting("second moment's decay", 0.999)
    adam_eps: float = setting("epsilon of Adam", 1e-8, "--adam-epsilon")
    optimizer_cpu_offload: bool = setting(
        "keep optimizer state in the host's memory and update there", False, "--sharding-offload"
    )
    optimizer_offload_fraction: float = setting(
        "share of the state that --optimizer-cpu-offload moves; 1: all that is not on disk", 1.0
    )
    nvme_offload_fraction: float = setting(
        "share of the state that lies in files and passes through memory at each step, updated by the host", 0.0
    )
    nvme_offload_dir: Optional[str] = setting("folder for these files, on a fast disk of the node", None)
    param_cpu_offload: bool = setting("keep the shards of --sharding-stage 3 in the host's memory", False)
    loss_averaging: Literal["token", "micro-batch"] = setting(
        "token: mean over all unmasked tokens of the global batch; micro-batch: Megatron-LM's mean of means",
        "token",
        "--calculate-per-token-loss=token",
    )

    @property
    def host_share(self) -> float:
        """Share of the optimizer's state that lies in the host's memory."""
        if not (self.optimizer_cpu_offload or self.optimizer == "cpu_adam"):
            return 0.0
        share = self.optimizer_offload_fraction
        return 1 - self.nvme_offload_fraction if share == 1 else share
