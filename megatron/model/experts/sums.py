# SPDX-License-Identifier: Apache-2.0
"""The sums over tokens that layers with experts return, and their weights in the loss. Needs no torch.

Each is a mean over layers: a layer divides its sum by the number of layers with experts. So its weight in the loss is the
coefficient times this number, and each layer's loss counts as much as Megatron-LM has it.
"""

from megatron.settings.schema import Model

BALANCING = {
    "aux_loss": "load balancing loss",
    "seq_aux_loss": "seq load balancing loss",
    "global_aux_loss": "global load balancing loss",
}
ROUTER_Z_LOSS, DROPPED, ENTROPY = "router z loss", "dropped tokens", "routing entropy"


def expert_sums(model: Model) -> dict[str, float]:
    """Name of a sum -> its weight in the loss; 0: it is only logged. Empty for a model without experts."""
    if not model.mixture:
        return {}
    layers = len(model.expert_layers)
    weights = {BALANCING[kind]: layers * weight for kind, weight in model.balancing if kind in BALANCING}
    if model.moe_z_loss_coeff:
        weights[ROUTER_Z_LOSS] = layers * model.moe_z_loss_coeff
    if model.moe_expert_capacity_factor is not None:
        weights[DROPPED] = 0.0
    return {**weights, ENTROPY: 0.0}
