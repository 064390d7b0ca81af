# SPDX-License-Identifier: Apache-2.0
"""The rules for combining settings of the optimizer (`settings.rules`)."""

from types import SimpleNamespace

from megatron.optimizer.kinds import COEFFICIENTS, formats_of, kinds_of, knows_matrices, state_of
from megatron.settings.declare import Needs
from megatron.settings.rules import Rule
from megatron.settings.schema import Optimizer

RULES = (
    Rule(
        lambda s: s.param_cpu_offload and s.sharding_stage != 3,
        lambda s: "--param-cpu-offload needs --sharding-stage 3: other stages keep all parameters on the device",
    ),
    Rule(
        lambda s: s.nvme_offload_fraction and not s.nvme_offload_dir,
        lambda s: (
            f"--nvme-offload-fraction {s.nvme_offload_fraction:g} needs --nvme-offload-dir, a folder on a fast disk "
            "of each node"
        ),
    ),
    Rule(
        lambda s: s.nvme_offload_fraction and s.fp8_format and s.fp8_param_gather and s.sharding_stage != 3,
        lambda s: (
            f"--fp8-param-gather with --nvme-offload-fraction {s.nvme_offload_fraction:g}: an update reads its file once, "
            "and scales have to be known before weights are cast; use --optimizer-cpu-offload, or --sharding-stage 3"
        ),
    ),
    Rule(
        lambda s: s.host_share + s.nvme_offload_fraction > 1 + 1e-9,
        lambda s: (
            f"--optimizer-offload-fraction {s.host_share:g} and --nvme-offload-fraction "
            f"{s.nvme_offload_fraction:g} add up to more than 1, all of the optimizer's state: give at most "
            f"--optimizer-offload-fraction {1 - s.nvme_offload_fraction:g}, or leave it out to keep on the host "
            "all that is not on disk"
        ),
    ),
    Rule(
        lambda s: s.precision == "fp16" and s.loss_scale is None and s.min_loss_scale > s.initial_loss_scale,
        lambda s: f"--min-loss-scale {s.min_loss_scale:g} is above --initial-loss-scale {s.initial_loss_scale:g}",
    ),
    Rule(
        lambda s: s.nvme_offload_fraction and not state_of(s.settings.optimizer),
        lambda s: (
            f"--nvme-offload-fraction has nothing to put into files: --optimizer {s.settings.optimizer.rule} keeps "
            "no state with these settings"
        ),
    ),
    Rule(
        lambda s: knows_matrices(s.settings.optimizer) and (s.host_share or s.nvme_offload_fraction),
        lambda s: (
            f"--optimizer {s.settings.optimizer.rule} keeps its state on the device, where it orthogonalises matrices: "
            "leave out --optimizer-cpu-offload and --nvme-offload-fraction; --sharding-stage 1 divides the state among "
            "ranks"
        ),
    ),
    Rule(
        lambda s: (
            s.settings.optimizer.rule == "muon" and s.muon_num_ns_steps % len(COEFFICIENTS[s.muon_coefficient_type])
        ),
        lambda s: (
            f"--muon-num-ns-steps {s.muon_num_ns_steps} must be a multiple of the "
            f"{len(COEFFICIENTS[s.muon_coefficient_type])} polynomials of --muon-coefficient-type {s.muon_coefficient_type}"
        ),
    ),
    Rule(
        lambda s: s.accumulate_allreduce_grads_in_fp32 and s.main_grads_dtype == "bf16",
        lambda s: (
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other: leave one out"
        ),
    ),
    Rule(
        lambda s: s.decoupled_min_lr is not None and s.decoupled_lr is None,
        lambda s: f"--decoupled-min-lr {s.decoupled_min_lr} needs --decoupled-lr, the highest rate of the embeddings",
    ),
)


def idle_of(settings: Optimizer) -> dict[str, Needs]:
    """Setting that only some optimizers read -> the requirement for it to have an effect: one of these optimizers."""
    kinds = kinds_of(settings)
    users = {
        name: [kind for kind in kinds if name in kinds[kind].names] for one in kinds.values() for name in one.names
    }
    formats = {
        "exp_avg_dtype": Needs("an optimizer with a first moment", lambda s: _keeps(s, "exp_avg_dtype")),
        "exp_avg_sq_dtype": Needs("--optimizer adam or muon", lambda s: _keeps(s, "exp_avg_sq_dtype")),
        "stochastic_rounding": Needs("--exp-avg-dtype bf16 or --exp-avg-sq-dtype bf16", _rounds),
    }
    return formats | {
        name: Needs(f"--optimizer {' or '.join(those)}", lambda s, those=those: s.settings.optimizer.rule in those)
        for name, those in users.items()
    }


def _keeps(s: SimpleNamespace, name: str) -> bool:
    """Whether this setting is the format of state that the optimizer keeps."""
    return name in formats_of(s.settings.optimizer)


def _rounds(s: SimpleNamespace) -> bool:
    """Whether the optimizer keeps bf16 state."""
    return any(getattr(s, name) == "bf16" for name in formats_of(s.settings.optimizer))


IDLE = idle_of(Optimizer())  # for the built-in optimizers
