# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other suites made with experts, planted here one at a time: for each, a test has to fail.

`MISTAKES` has the plant and the test. Tests that run a model or write files take long: `--full`. `test_own_experts.py` and
`test_balanced_experts.py` plant mistakes in layers of one's own.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import folder as checkpoint_folder
from megatron.convert import fitted, megatron_export
from megatron.errors import Failure
from megatron.model import facts, language_model
from megatron.model.hf_match import Match
from megatron.model.kinds.experts import grouped, hf, parts, router, routing
from megatron.mpu import collectives, mappings
from megatron.mpu.forked import run_ranks
from megatron.mpu.placement import Buffer, Placement
from megatron.optimizer import zero
from megatron.optimizer.buffers import BufferStore
from megatron.optimizer.units import FlatUnit
from megatron.optimizer.zero import DistributedOptimizer
from tests.inference import test_hf_experts, test_megatron_experts
from tests.model import test_router
from tests.models import test_expert_layouts as layouts
from tests.settings import test_expert_settings

Router = router.Router
Plant = Callable[[pytest.MonkeyPatch], None]


# ---- tests -----------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """run: calls a test with a folder and a MonkeyPatch. full: it takes long."""

    run: Callable
    full: bool = True


def layout(name: str) -> Check:
    """A whole run in a layout of `test_expert_layouts.py`."""
    return Check(lambda folder, patch: layouts.test_any_layout_is_the_plain_loop(name, folder))


def part(test: Callable, *arguments) -> Check:
    return Check(lambda folder, patch: test(*arguments), full=False)


def files(test: Callable, *arguments) -> Check:
    return Check(lambda folder, patch: test(*arguments, folder))


def without_tokens(folder, patch):
    """Ranks without tokens, which do not wait for the usual time."""
    patch.setattr(layouts, "run_ranks", lambda *words, timeout: run_ranks(*words, timeout=15))
    layouts.test_ranks_without_tokens("ep2, zero3", folder, patch)


# ---- gradients -------------------------------------------------------------------------------------------------------


def times_ep(patch):
    real = grouped.outer
    patch.setattr(grouped, "outer", lambda *words: 2 * real(*words))


def reduced_as_dense(patch):
    patch.setattr(FlatUnit, "replicate", "replicate")
    patch.setattr(FlatUnit, "sharded", "shard")


def doubled_by_recomputation(patch):
    real = language_model.recomputed

    def recomputed(*words, **more):
        x, sums = real(*words, **more)
        return 2 * x - x.detach(), sums

    patch.setattr(language_model, "recomputed", recomputed)


def with_router_table(change: Callable[[str, Placement], Placement]) -> Plant:
    real = facts.branch_weights.__wrapped__  # not the cache, which would keep what is planted
    weights = lambda *words: {
        name: change(name, one) if ".router." in name else one for name, one in real(*words).items()
    }
    return lambda patch: patch.setattr(facts, "branch_weights", weights)


def of_one_tp_rank(which: str) -> Plant:
    return with_router_table(lambda name, one: replace(one, partial=()) if name.endswith(which) else one)


def piece_of_gradient(patch):
    whole, piece = (lambda x, axis: collectives.all_gather(x, axis)), (lambda x, axis: x.chunk(axis.size)[axis.rank])
    patch.setattr(mappings, "gather_from_sequence_parallel_region", mappings.conjugate(whole, piece))


def gradient_of_own_rows(patch):
    def padded(gradient, axis):
        parts = [torch.zeros_like(gradient) for _ in range(axis.size)]
        parts[axis.rank] = gradient
        return torch.cat(parts)

    patch.setattr(mappings, "cut_rows", mappings.conjugate(lambda x, axis: x.chunk(axis.size)[axis.rank], padded))


def bias_of_one_etp_rank(patch):
    patch.setattr(zero, "PARTIAL", tuple(axis for axis in zero.PARTIAL if axis != "etp"))


def weights_of_pairs_without_gradient(patch):
    real = router.weights_of
    patch.setattr(router, "weights_of", lambda *words: real(*words).detach())


# ---- norm ------------------------------------------------------------------------------------------------------------


def counting(wanted: Callable[[dict], bool]) -> Plant:
    real = Placement.is_primary
    primary = lambda self, place: real(self, place) and ("ep" not in self.cut or wanted(place))
    return lambda patch: patch.setattr(Placement, "is_primary", primary)


def experts_times(factor: Callable) -> Plant:
    """Multiplies the part of experts in the squared norm."""
    real = DistributedOptimizer._squared_norm

    def norm(self):
        every = self.owned
        self.owned = [own for own in every if own.unit.replicate == "replicate"]
        dense = real(self)
        self.owned = every
        return dense + (real(self) - dense) * factor(self.mesh)

    return lambda patch: patch.setattr(DistributedOptimizer, "_squared_norm", norm)


def norm_of_each_rank(patch):
    real = DistributedOptimizer.reduce_grads

    def reduce_grads(self, sums):
        vector = real(self, sums)
        vector[0] = self._squared_norm().sqrt()
        return vector

    patch.setattr(DistributedOptimizer, "reduce_grads", reduce_grads)


# ---- auxiliary losses ------------------------------------------------------------------------------------------------


def with_balance(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    real = parts.balance_loss
    return lambda patch: patch.setattr(parts, "balance_loss", lambda *words: change(real(*words)))


def total_over(*axes: str) -> Plant:
    def total(self, x, axis=None):
        for name in axes if axis is None else ():
            collectives.all_reduce(x, getattr(self, name))
        return x

    return lambda patch: patch.setattr(Router, "total", total)


def sum_of_own_rows(patch):
    patch.setattr(mappings, "reduce_from_tensor_model_parallel_region", lambda x, axis: x)


def twice_when_recomputed(patch):
    real = language_model.recomputed

    def recomputed(*words, **more):
        x, sums = real(*words, **more)
        return x, {name: 2 * value - value.detach() for name, value in sums.items()}

    patch.setattr(language_model, "recomputed", recomputed)


def chosen_again(patch):
    real = Router.forward
    patch.setattr(Router, "forward", lambda self, *words, memo=None: real(self, *words))


def equal_loads_if_padded(patch):
    real = Router._loads

    def loads(self, *words):
        found = real(self, *words)
        even = {name: torch.ones_like(one) for name, one in found.items()}
        return even if self.model.moe_pad_expert_input_to_capacity else found

    patch.setattr(Router, "_loads", loads)


def loads_of_what_fits(patch):
    """Drops come before the losses count: an expert has no more tokens than its capacity."""
    real = Router._loads

    def loads(self, experts, counted):
        found = real(self, experts, counted)
        if (factor := self.model.moe_expert_capacity_factor) is None:
            return found
        most = router.capacity(experts[..., 0].numel(), self.choice.topk, self.choice.num_experts, factor)
        return {name: one.clamp(max=most) for name, one in found.items()}

    patch.setattr(Router, "_loads", loads)


def loads_of_one_rank(patch):
    """Global loss: neither other ranks nor the micro-batches before."""

    def loads(self, experts, counted):
        counted = None if counted is None else counted.t()
        own = routing.count_experts(experts.transpose(0, 1), self.choice.num_experts, counted)
        return dict.fromkeys(self.ways, own.sum(0))

    patch.setattr(Router, "_loads", loads)


def loads_of_steps_before(patch):
    real = Router.update_buffers

    def update_buffers(self):
        kept = self.scored_load.clone()
        real(self)
        self.scored_load.copy_(kept)

    patch.setattr(Router, "update_buffers", update_buffers)


def biased_choices_in_losses(patch):
    """Losses count what tokens chose with the bias, not the best scores."""
    real = Router._loads

    def loads(self, experts, counted):
        if "expert_bias" in self.placements:
            experts = self.expert_bias.topk(self.choice.topk).indices.expand_as(experts)
        return real(self, experts, counted)

    patch.setattr(Router, "_loads", loads)


# ---- bias ------------------------------------------------------------------------------------------------------------


def buffer_in_bf16(name: str) -> Plant:
    real = Router.__init__

    def init(self, *words, **more):
        real(self, *words, **more)
        if name in self._buffers:
            self._buffers[name] = self._buffers[name].bfloat16()

    return lambda patch: patch.setattr(Router, "__init__", init)


def moved_in_floats(patch):
    moved = lambda bias, loads, rate: bias + rate * (loads.float().mean() - loads.float()).sign()
    patch.setattr(router, "moved_bias", moved)


def padding_counts(patch):
    real = router.count_experts
    patch.setattr(router, "count_experts", lambda experts, number, counted=None: real(experts, number))


def load_of_one_rank(patch):
    of_one = lambda name, one: replace(one, buffer=Buffer("same", "int64")) if name.endswith("router.load") else one
    with_router_table(of_one)(patch)


def rounded_for_megatron(patch):
    real = megatron_export.rank_tensors

    def tensors(*words):
        found = real(*words)
        return {name: x.bfloat16() if name.endswith("expert_bias") else x for name, x in found.items()}

    patch.setattr(megatron_export, "rank_tensors", tensors)


def not_saved(patch):
    real = BufferStore.pieces
    kept = lambda self, unique=False: [one for one in real(self, unique) if "expert_bias" not in one.name]
    patch.setattr(BufferStore, "pieces", kept)


def weights_from_biased_scores(patch):
    """Scores are recovered as biased scores less the bias."""
    real, biases = routing._scores, []
    choose = router.choose

    def remembered(logits, rule, bias=None):
        biases[:] = [bias]
        return choose(logits, rule, bias)

    def weights_of(logits, experts, rule):
        recovered = lambda *words: real(*words) + biases[0] - biases[0]
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(routing, "_scores", recovered)
            return routing.weights_of(logits, experts, rule)

    patch.setattr(router, "choose", remembered)
    patch.setattr(router, "weights_of", weights_of)


def weights_with_bias(patch):
    weights_from_biased_scores(patch)
    recovered, real = router.weights_of, router.choose
    biases = []

    def choose(logits, rule, bias=None):
        biases[:] = [bias]
        return real(logits, rule, bias)

    patch.setattr(router, "choose", choose)
    patch.setattr(router, "weights_of", lambda logits, *words: recovered(logits + biases[0], *words))


def excluded_groups_are_zero(patch):
    patch.setattr(routing, "math", SimpleNamespace(inf=0.0))


# ---- experts without tokens ------------------------------------------------------------------------------------------


def ranks_without_tokens_leave(patch):
    """No gradient flows back, so such a rank never sends gradients."""
    real = grouped.GroupedLinear.forward
    empty = lambda self, x: x.new_zeros(0, math.prod(self.weight.shape[1:-1]))
    forward = lambda self, x, rows, *more: real(self, x, rows, *more) if len(x) else empty(self, x)
    patch.setattr(grouped.GroupedLinear, "forward", forward)


def not_a_number(patch):
    real = grouped.outer

    def outer(a, b, rows):
        found = real(a, b, rows)
        return found / (rows.counts > 0).to(found).view(-1, 1, 1)

    patch.setattr(grouped, "outer", outer)


def no_decay_without_gradient(patch):
    real = DistributedOptimizer.step

    def step(self, *words, **more):
        pairs = [(state, own) for state in self.states for own in state.owned if own.unit.replicate != "replicate"]
        idle = [
            (
                state.main[state.slice_of(own)],
                self.reduced[own.shard_slice] == 0,
                state.main[state.slice_of(own)].clone(),
            )
            for state, own in pairs
        ]
        real(self, *words, **more)
        for main, without, before in idle:
            main[without] = before[without]

    patch.setattr(DistributedOptimizer, "step", step)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def same_names(patch):
    real = Placement.box
    patch.setattr(Placement, "box", lambda self, shape, ranks: real(self, shape, {**ranks, "ep": 0, "ep_etp": 0}))


def moments_stay(patch):
    real = checkpoint_folder._load
    moment = lambda piece: piece.name.startswith("optimizer.") and ".experts." in piece.name

    def load(path, pieces, *rest):
        return real(path, [piece for piece in pieces if not moment(piece)], *rest)

    patch.setattr(checkpoint_folder, "_load", load)


def numbered_by_stage(patch):
    """Ranks of another stage count experts from another one on."""
    real = Placement.box

    def box(self, shape, ranks):
        if "ep" in self.cut and shape[0] < self.shape[0]:
            ranks = {**ranks, "ep": (ranks["ep"] + ranks["pp"]) % (self.shape[0] // shape[0])}
        return real(self, shape, ranks)

    patch.setattr(Placement, "box", box)


# ---- exchange with other programs --------------------------------------------------------------------------------------


def with_files(change: Callable) -> Plant:
    """A change of the files before their tensors are accounted for; it gets the names of the model's, too."""
    real = fitted._with_head_of

    def with_head_of(files, folder, settings, family):
        change(files, {name for match in family.matches for name in match.theirs})
        return real(files, folder, settings, family)

    return lambda patch: patch.setattr(fitted, "_with_head_of", with_head_of)


def ignore_unknown(files, wanted):
    files.shapes = {name: shape for name, shape in files.shapes.items() if name in wanted}


def zeros_for_missing(files, wanted):
    known, get = dict(files.shapes), files.get
    like = {name: known[name.replace("experts.3.", "experts.0.")] for name in wanted - known.keys()}
    files.shapes = known | like
    files.get = lambda name: torch.zeros(like[name]) if name in like else get(name)


def with_matches(change: Callable[[Match], Match]) -> Plant:
    real = hf.matches
    return lambda patch: patch.setattr(hf, "matches", lambda *words: list(map(change, real(*words))))


def transposed(match: Match) -> Match:
    if "experts.down.weight" not in match.ours:
        return match
    return match._replace(
        to_ours=lambda theirs: match.to_ours(theirs).mT, to_theirs=lambda ours: match.to_theirs(ours.mT)
    )


def experts_of_the_first_rank(patch):
    real = megatron_export._experts
    patch.setattr(megatron_export, "_experts", lambda *words: real(*words[:-1], 0))


def rules_are_missing(patch):
    patch.setattr(pretrain_gpt, "rules_of", lambda *kinds: ())


# ---- the table -------------------------------------------------------------------------------------------------------

WRONG = {flags: (world, flags, said) for world, flags, said in test_expert_settings.WRONG}
GROUPS = next(flags for flags in WRONG if "num-groups 3" in flags)
LOSSES = part(test_router.test_gradients_of_losses_are_those_of_megatron_core, 2)
EVERY_LOSS = test_router.EVERYTHING
DIVISIONS = files(layouts.test_any_division_of_experts_reads_any_other_to_the_bit)
LACKING = files(test_hf_experts.test_a_file_that_lacks_an_expert_is_named)


class Mistake(NamedTuple):
    """plant: makes it. test: has to fail. said: part of the failure, if the run itself says so."""

    plant: Plant
    test: Check
    said: str = ""


MISTAKES = {
    # gradients
    "gradients of experts times ep": Mistake(times_ep, layout("ep2")),
    "experts are reduced as dense weights": Mistake(reduced_as_dense, layout("ep2")),
    "whole experts of tp ranks are reduced as dense weights": Mistake(reduced_as_dense, layout("tp2, whole experts")),
    "a factor of recomputation stays": Mistake(doubled_by_recomputation, layout("recomputed layers")),
    "the router is not summed over tp": Mistake(
        of_one_tp_rank("router.weight"), layout("tp2, whole experts"), "hold different bits"
    ),
    "the router is not summed over tp with sequence parallelism": Mistake(
        of_one_tp_rank("router.weight"), layout("tp2 with sequence parallelism"), "hold different bits"
    ),
    "the gradient of what experts read is not summed": Mistake(piece_of_gradient, layout("etp2")),
    "the gradient of what tp ranks route is not gathered": Mistake(gradient_of_own_rows, layout("tp2")),
    "biases of experts are not summed over etp": Mistake(
        bias_of_one_etp_rank, layout("etp2, biases"), "hold different bits"
    ),
    "routers learn nothing from the loss": Mistake(weights_of_pairs_without_gradient, layout("one process")),
    # norm
    "the norm is averaged over ranks": Mistake(experts_times(lambda mesh: 1 / mesh.ep.size), layout("ep2")),
    "each rank has its own norm": Mistake(norm_of_each_rank, layout("ep2"), "hold different bits"),
    "the norm leaves experts out": Mistake(counting(lambda place: False), layout("ep2")),
    "the norm has the experts of one rank": Mistake(counting(lambda place: place["ep"] == 0), layout("ep2")),
    "the norm counts copies of experts": Mistake(
        experts_times(lambda mesh: mesh.expert_replicate.size), layout("tp2, whole experts")
    ),
    # auxiliary losses
    "the loss has no gradient": Mistake(with_balance(torch.Tensor.detach), LOSSES),
    "the loss is multiplied by micro-batches": Mistake(with_balance(lambda x: 4 * x), layout("one process")),
    "the loss depends on tp": Mistake(
        total_over("cp"), part(test_router.test_parts_of_sequences_give_the_same_as_whole_ones, dict(tp=2), EVERY_LOSS)
    ),
    "the loss depends on cp": Mistake(
        total_over("tp"), part(test_router.test_parts_of_sequences_give_the_same_as_whole_ones, dict(cp=2), EVERY_LOSS)
    ),
    "the loss has the rows of one tp rank": Mistake(
        sum_of_own_rows, part(test_router.test_parts_of_sequences_give_the_same_as_whole_ones, dict(tp=2), EVERY_LOSS)
    ),
    "the global loss has the loads of one rank": Mistake(
        loads_of_one_rank, part(test_router.test_global_loss_counts_all_ranks_and_micro_batches)
    ),
    "the global loss has the loads of steps before": Mistake(loads_of_steps_before, layout("tp2, global loss")),
    "the loss counts twice where layers are recomputed": Mistake(
        twice_when_recomputed, layout("recomputed layers, losses")
    ),
    "recomputation chooses and counts again": Mistake(
        chosen_again, part(test_router.test_second_run_takes_the_choices_of_the_first)
    ),
    "the loss is 1 with padding": Mistake(
        equal_loads_if_padded, part(test_router.test_losses_count_what_is_dropped, True)
    ),
    "the loss counts what fits": Mistake(
        loads_of_what_fits, part(test_router.test_losses_count_what_is_dropped, False)
    ),
    "the loss counts choices with the bias": Mistake(
        biased_choices_in_losses,
        part(test_router.test_losses_count_the_best_scores_without_the_bias_and_loads_are_exact),
    ),
    # bias
    "the bias is bf16": Mistake(buffer_in_bf16("expert_bias"), files(layouts.test_half_precision_leaves_biases_exact)),
    "loads are bf16": Mistake(
        buffer_in_bf16("load"), part(test_router.test_losses_count_the_best_scores_without_the_bias_and_loads_are_exact)
    ),
    "the mean load is rounded": Mistake(moved_in_floats, part(test_router.test_bias_is_moved_by_the_sign_of_the_load)),
    "padding is counted": Mistake(padding_counts, part(test_router.test_padding_is_not_counted)),
    "loads of one rank": Mistake(load_of_one_rank, layout("ep4, one sample at a time"), "expert_bias differs"),
    "loads of one tp rank": Mistake(of_one_tp_rank("router.load"), layout("tp2, whole experts"), "expert_bias differs"),
    "the bias is rounded in files for transformers": Mistake(
        with_matches(lambda match: match._replace(exact=False)),
        files(test_hf_experts.test_expert_bias_is_fp32_in_bf16_files),
    ),
    "the bias is rounded in files for Megatron-LM": Mistake(
        rounded_for_megatron,
        files(test_megatron_experts.test_there_and_back_in_any_layout, "gated", "--ep 4 --dtype bf16"),
    ),
    "the bias is not saved": Mistake(not_saved, DIVISIONS),
    "weights are biased scores less the bias": Mistake(
        weights_from_biased_scores, part(test_router.test_weights_exclude_the_bias_and_evaluation_counts_nothing)
    ),
    "weights have the bias": Mistake(
        weights_with_bias, part(test_router.test_weights_exclude_the_bias_and_evaluation_counts_nothing)
    ),
    "a negative bias excludes a group": Mistake(
        excluded_groups_are_zero, part(test_router.test_a_negative_bias_excludes_no_group)
    ),
    # experts without tokens
    "ranks without tokens leave": Mistake(ranks_without_tokens_leave, Check(without_tokens), "did not answer"),
    "the gradient of an expert without tokens is NaN": Mistake(
        not_a_number, part(layouts.test_products_of_groups_are_one_product_for_each)
    ),
    "experts without tokens do not decay": Mistake(no_decay_without_gradient, Check(without_tokens)),
    # checkpoints
    "ranks give their experts the same names": Mistake(
        same_names, layout("ep2"), "do not hold the model that the settings describe"
    ),
    "the experts of one rank are saved": Mistake(counting(lambda place: place["ep"] == 0), DIVISIONS),
    "moments stay where another ep takes over": Mistake(moments_stay, DIVISIONS),
    "stages number experts in another order": Mistake(numbered_by_stage, layout("pp2 ep2")),
    # exchange with other programs
    "experts of a file are ignored": Mistake(with_files(ignore_unknown), LACKING),
    "experts that a file lacks are zero": Mistake(with_files(zeros_for_missing), LACKING),
    "Mixtral's square matrices are transposed": Mistake(
        with_matches(transposed), files(test_hf_experts.test_square_output_matrices_are_not_transposed, "mixtral")
    ),
    "gpt-oss's square matrices are transposed": Mistake(
        with_matches(transposed), files(test_hf_experts.test_square_output_matrices_are_not_transposed, "gpt_oss")
    ),
    "an export has the experts of one rank": Mistake(
        experts_of_the_first_rank,
        files(test_megatron_experts.test_there_and_back_in_any_layout, "gated", "--ep 4 --dtype bf16"),
    ),
    "groups do not divide the experts": Mistake(
        rules_are_missing, part(test_expert_settings.test_a_wrong_use_has_one_message, *WRONG[GROUPS])
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[pytest.mark.full] * one.test.full) for name, one in MISTAKES.items()]
)
def test_a_test_finds_it(mistake, tmp_path, monkeypatch):
    plant, test, said = MISTAKES[mistake]
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, Failure, pytest.fail.Exception), match=said or None):
        test.run(tmp_path, monkeypatch)
