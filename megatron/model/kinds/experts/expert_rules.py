# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings of experts (`settings.rules`)."""

from types import SimpleNamespace

from megatron.model.kinds.experts.parts import known_ways, parts_of
from megatron.model.kinds.experts.settings import SYMBOL
from megatron.mpu.axis_sizes import ep_levels, ep_library
from megatron.mpu.expert_libraries import FORMATS, LEAVE_OUT, DispatchSizes, library_problem
from megatron.settings.rank_env import ranks
from megatron.settings.rules import Rule, divisors, either, said


def _mixture(s: SimpleNamespace) -> bool:
    return s.settings.model.mixture


def _pattern_error(s: SimpleNamespace) -> str:
    """What is wrong with --moe-layer-freq; "" if nothing is."""
    if s.settings.model.letters:
        return ""
    try:
        layers = s.settings.model.expert_layers
    except ValueError as error:
        return str(error)
    return "" if layers or not _mixture(s) else "no layer has experts then; leave out --num-experts"


def _kinds(s: SimpleNamespace) -> list[str]:
    return s.settings.model.balancing_kinds


def _coefficients(s: SimpleNamespace) -> list[float]:
    return s.moe_aux_loss_coeff or [0.0]


def _losses(s: SimpleNamespace, chosen: bool = True) -> list[str]:
    """The chosen ways to balance that have a loss, or all that there are."""
    known = known_ways(s.settings.model)
    return [kind for kind in (_kinds(s) if chosen else known) if known[kind].label]


def _choosing(s: SimpleNamespace) -> list[str]:
    """The chosen ways to balance that choose experts by themselves."""
    return [kind for kind in _kinds(s) if known_ways(s.settings.model)[kind].chooses]


def _bad_groups(s: SimpleNamespace) -> str:
    """What is wrong with the choice of groups; "" if nothing is."""
    groups, chosen, k = s.moe_router_num_groups, s.moe_router_group_topk, s.moe_router_topk
    if not (_mixture(s) and groups and chosen):
        return ""
    if chosen > groups:
        return f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}"
    of_score, members = s.moe_router_group_score_topk, s.num_experts // groups
    if of_score and (of_score > members or k > chosen * members):
        return (
            f"--moe-router-topk {k} and --moe-router-group-score-topk {of_score} from --moe-router-group-topk {chosen} "
            f"groups of {members} experts: there are not as many"
        )
    if not of_score and (k % chosen or k // chosen > members):
        return (
            f"--moe-router-topk {k} from --moe-router-group-topk {chosen} groups of {s.num_experts // groups} experts: it "
            "must be a multiple, and each group must have as many"
        )
    return ""


def _etp(s: SimpleNamespace) -> int:
    """Ranks that divide each expert."""
    return max(1, s.expert_tensor_parallel_size or s.tp)


def _cannot_be_divided(flag: str, size: int, words: str, ranks: int) -> str:
    return f"{flag} {size} cannot be divided by {words}; nearest: {either(divisors(size or 1, ranks))} ranks"


def _library_problem(s: SimpleNamespace) -> str:
    """Why the library of --moe-flex-dispatcher-backend cannot send tokens in this layout; "" if it can."""
    p, model, backend = s.settings.parallel, s.settings.model, s.moe_flex_dispatcher_backend
    if not (_mixture(s) and backend and ep_library(p) and s.moe_token_dispatcher_type == "flex"):
        return ""
    if s.num_experts % p.expert_model_parallel_size:
        return ""  # another rule says it
    if s.precision not in (*FORMATS, "auto") or s.amp_level == "O1":
        return f"tokens are sent in {' or '.join(FORMATS)}; --bf16, and not --amp-level O1"
    inner, outer = ep_levels(p, s.local_world_size or ranks().local_world_size or 8)
    ep = inner * outer
    return library_problem(backend, DispatchSizes(ep, inner, s.num_experts // ep, model.expert_hidden_size))


RULES = (
    Rule(
        lambda s: s.settings.model.letters and (given := s.settings.given("moe_layer_freq")) and given.is_request,
        lambda s: (
            f"{said(s, 'moe_layer_freq')}: --hybrid-layer-pattern lists the layers with experts ({SYMBOL}); "
            "leave the one or the other out"
        ),
    ),
    Rule(
        lambda s: SYMBOL in s.settings.model.letters_ahead and SYMBOL not in s.settings.model.letters,
        lambda s: (
            f"--hybrid-layer-pattern {s.settings.model.hybrid_layer_pattern} has experts ({SYMBOL}) in depths of "
            "multi-token prediction alone; give layers of the network experts, too, or write - in the depths"
        ),
    ),
    Rule(
        lambda s: SYMBOL in s.settings.model.letters and not _mixture(s),
        lambda s: (
            f"--hybrid-layer-pattern {s.settings.model.letters} has layers with experts ({SYMBOL}); add --num-experts"
        ),
    ),
    Rule(
        lambda s: _mixture(s) and s.num_experts % max(1, s.expert_model_parallel_size),
        lambda s: _cannot_be_divided(
            "--num-experts", s.num_experts, said(s, "expert_model_parallel_size"), s.expert_model_parallel_size
        ),
    ),
    Rule(
        lambda s: _mixture(s) and s.settings.model.expert_ffn_size % _etp(s),
        lambda s: _cannot_be_divided(
            "--moe-ffn-hidden-size" if s.moe_ffn_hidden_size else "--ffn-hidden-size",
            s.settings.model.expert_ffn_size,
            said(s, "expert_tensor_parallel_size" if s.expert_tensor_parallel_size else "tensor_model_parallel_size"),
            _etp(s),
        ),
    ),
    Rule(
        lambda s: _mixture(s) and (s.moe_shared_expert_intermediate_size or 0) % s.tp,
        lambda s: _cannot_be_divided(
            "--moe-shared-expert-intermediate-size",
            s.moe_shared_expert_intermediate_size,
            said(s, "tensor_model_parallel_size"),
            s.tp,
        ),
    ),
    Rule(
        _pattern_error,
        lambda s: (
            f"--moe-layer-freq {s.moe_layer_freq} for --num-layers {s.num_layers}: {_pattern_error(s)}; give N for every "
            "N-th layer, or a 0 or 1 for each layer, as [0]*1+[1]*27"
        ),
    ),
    Rule(
        lambda s: _mixture(s) and s.moe_router_topk > s.num_experts,
        lambda s: f"--moe-router-topk {s.moe_router_topk} is more than --num-experts {s.num_experts}",
    ),
    Rule(
        lambda s: (
            _mixture(s)
            and s.moe_router_topk == 1
            and s.moe_router_score_function == "softmax"
            and not s.moe_router_pre_softmax
            and not _choosing(s)
        ),
        lambda s: (
            "--moe-router-topk 1: the softmax over one chosen expert is 1, and the router would not learn; add "
            "--moe-router-pre-softmax"
        ),
    ),
    Rule(
        lambda s: len(_coefficients(s)) not in (1, len(_kinds(s))),
        lambda s: (
            f"--moe-aux-loss-coeff has {len(_coefficients(s))} numbers for {len(_kinds(s))} values of "
            "--moe-router-load-balancing-type; give one for each, or one for all"
        ),
    ),
    Rule(
        lambda s: any(not 0 <= one < float("inf") for one in _coefficients(s)),
        lambda s: f"--moe-aux-loss-coeff {' '.join(f'{one:g}' for one in _coefficients(s))} must be 0 or more",
    ),
    Rule(
        lambda s: len(set(_losses(s))) < len(_kinds(s)) > 1,
        lambda s: (
            f"--moe-router-load-balancing-type {' '.join(_kinds(s))}: several are for "
            f"{' and '.join(', '.join(_losses(s, chosen=False)).rsplit(', ', 1))}, each once"
        ),
    ),
    Rule(
        lambda s: _choosing(s) and (s.moe_router_num_groups or s.moe_router_enable_expert_bias),
        lambda s: (
            f"--moe-router-load-balancing-type {''.join(_choosing(s)[:1])} chooses experts by itself, without "
            "--moe-router-num-groups and --moe-router-enable-expert-bias"
        ),
    ),
    Rule(
        lambda s: (s.moe_router_num_groups is None) != (s.moe_router_group_topk is None),
        lambda s: (
            "--moe-router-num-groups and --moe-router-group-topk belong together: the groups of experts, and how many "
            "of them a token chooses from"
        ),
    ),
    Rule(
        lambda s: _mixture(s) and s.moe_router_num_groups and s.num_experts % s.moe_router_num_groups,
        lambda s: (
            f"--moe-router-num-groups {s.moe_router_num_groups} does not divide --num-experts {s.num_experts}; nearest: "
            f"{either(divisors(s.num_experts or 1, s.moe_router_num_groups or 1))}"
        ),
    ),
    Rule(_bad_groups, _bad_groups),
    Rule(
        lambda s: s.moe_pad_expert_input_to_capacity and s.moe_expert_capacity_factor is None,
        lambda s: "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor, such as 1.25",
    ),
    Rule(
        lambda s: _mixture(s) and s.moe_token_dispatcher_type == "flex" and s.moe_pad_expert_input_to_capacity,
        lambda s: (
            "--moe-token-dispatcher-type flex sends tokens, and --moe-pad-expert-input-to-capacity as many rows to each "
            "expert; leave one of the two out"
        ),
    ),
    Rule(
        lambda s: s.moe_token_dispatcher_type == "flex" and parts_of(s.settings.model).dispatcher,
        lambda s: "--moe-token-dispatcher-type flex: this model brings a dispatcher of its own; leave the flag out",
    ),
    Rule(
        _library_problem, lambda s: f"{said(s, 'moe_flex_dispatcher_backend')}: {_library_problem(s)}; or {LEAVE_OUT}"
    ),
    Rule(
        lambda s: (s.moe_deepep_num_sms or 0) % 2 or (s.moe_hybridep_num_sms or 0) % 2,
        lambda s: "--moe-deepep-num-sms and --moe-hybridep-num-sms are even numbers",
    ),
    Rule(
        lambda s: s.moe_shared_expert_gate and s.moe_shared_expert_intermediate_size is None,
        lambda s: "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size",
    ),
)
