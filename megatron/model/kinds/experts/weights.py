# SPDX-License-Identifier: Apache-2.0
"""The weights of a layer's router and experts (`model.weights`). Needs no torch."""

from megatron.model.kinds.experts.parts import parts_of, ways_of
from megatron.model.kinds.mlp.kind import mlp
from megatron.model.weights import add_prefix, column, output_std, replicated, row
from megatron.mpu.placement import Buffer, Constant, Normal, Placement, Table
from megatron.settings.schema import Model


def experts(model: Model, sequence_parallel: bool) -> Table:
    """The weights of a layer's router and experts, of the products to latents and back, and of its shared expert.

    Ranks of tp route different tokens, with and without sequence parallelism.
    """
    m, width, own = model, model.expert_hidden_size, dict(bias=not model.disable_bias_linear, experts=model.num_experts)
    f, (rows, cut, parts) = m.expert_ffn_size, ((2,), 1, (0, (1, 1))) if m.gated else ((), 0, None)
    table = {
        **add_prefix("router", getattr(parts_of(m).router, "weights", router)(m)),
        **add_prefix("experts.up", column(width, (*rows, f), m.init_method_std, cut=cut, matrices=parts, **own)),
        **add_prefix("experts.down", row(f, width, output_std(m), **own)),
    }
    if m.moe_latent_size:
        more = dict(bias=not m.disable_bias_linear, sequence_parallel=True)
        table |= add_prefix("latent_down", replicated(m.hidden_size, width, m.init_method_std, **more))
        table |= add_prefix("latent_up", replicated(width, m.hidden_size, output_std(m), **more))
    if m.moe_shared_expert_intermediate_size:
        table |= add_prefix("shared", mlp(m, sequence_parallel, m.moe_shared_expert_intermediate_size))
    if m.moe_shared_expert_gate:
        partial = ("tp",) * sequence_parallel
        table["shared_gate.weight"] = Placement((1, m.hidden_size), Normal(m.init_method_std), partial=partial)
    return table


def router(model: Model) -> Table:
    """The router's weight [E, h], its bias [E] if other linear layers have one (as in Megatron-Core), the bias of each
    expert's score for the choice, and the number of tokens that chose each expert in this step, also by scores without it.
    """
    each = (model.num_experts,)
    table = {
        "weight": Placement((*each, model.hidden_size), Normal(model.init_method_std), partial=("tp",)),
        "load": Placement(each, Constant(0), partial=("tp",), buffer=Buffer("sum", "int64")),
    }
    if not model.disable_bias_linear:
        table["bias"] = Placement(each, Constant(0.0), partial=("tp",), decay=False)
    if model.moe_router_enable_expert_bias:
        table["expert_bias"] = Placement(each, Constant(0), buffer=Buffer("same", "float32"))
    for way in ways_of(model).values():
        table |= way.buffers(table["load"])
    return table
