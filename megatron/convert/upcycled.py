# SPDX-License-Identifier: Apache-2.0
"""Write a mixture of experts from the checkpoint of a dense model, as `model.kinds.experts.upcycling` says."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.index import Tensor
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import Rewritten, rewrite
from megatron.convert.families import prompts_for
from megatron.errors import CheckpointError, SettingsError, UsageError
from megatron.inference.load import load_model, refuse_head
from megatron.model.kinds.experts import expert_rules, upcycling
from megatron.model.recipe import config_of, facts_of, kind_of
from megatron.settings.from_checkpoint import located
from megatron.settings.rules import out_of_range, record
from megatron.settings.schema import Config, Parallel
from megatron.storage.new_folder import removed_after_error

BOUND = 1e-6  # of the largest logit


def upcycle(
    path: Path, out: Path, given: Mapping[str, Any], *, seed: int = 1234, writers: int = 1, check: bool = True
) -> list[str]:
    """Write the checkpoint at `path` to the folder `out` with experts in the place of MLPs; returns notices.

    given: settings of experts. check: compare the logits of both models. Optimizer state is left out.
    Raises SettingsError for other settings, or a mixture that computes something else; CheckpointError if it does.
    Removes its output after an error.
    """
    with removed_after_error(out):
        with Reader(path) as reader:
            config = mixture_of(reader, given)
        new = rewrite(path, out, partial(upcycled, config=config, seed=seed), writers)
        m = config.model
        notices = [f"{new}: {m.num_experts} experts in {len(m.expert_layers)} of {m.num_layers} layers"]
        notices += [_compared(path, new, config, reader.state["vocab_size"])] if check else []
    return [*notices, f"train on with --load {out} --finetune"]


def mixture_of(reader: Reader, given: Mapping[str, Any]) -> Config:
    """The settings of the mixture. Raises SettingsError, or UsageError, for what cannot become one."""
    saved = config_of(located(reader.state))
    if (number := given.get("num_experts")) is None:
        raise UsageError("the number of experts is missing", do="give --num-experts N, at least 2")
    if number < 2:
        raise SettingsError(f"--num-experts {number}: a mixture has at least 2 experts")
    if saved.model.mixture:
        raise SettingsError(f"{reader.folder} has {saved.model.num_experts} experts already", do="give a dense model")
    refuse_head(saved, reader.state["vocab_size"], reader.folder)
    kind = kind_of(facts_of(saved, reader.state["vocab_size"]))
    special = saved.model.linear or saved.model.sparsity is not None
    if kind != "GPT" or special:
        raise SettingsError(
            f"{reader.folder} is a {kind}{' with special linear layers' * bool(special)}",
            "experts are upcycled from the MLPs of a GPT",
            "merge adapters first (merge-lora), or apply masks (apply-masks)" if special else None,
        )
    config = replace(saved, model=replace(saved.model, **given))
    refuse_broken(config)
    upcycling.refuse_unequal(config.model)
    return config


def upcycled(reader: Reader, config: Config, seed: int) -> Rewritten:
    """The mixture. Formats are those of the dense model, and of its embedding for new tensors."""
    state, stored = reader.state, reader.tensors
    placements = facts_of(config, state["vocab_size"]).weights

    def entry(name: str) -> Tensor:
        source = upcycling.source_of(name) or ("embedding.word.weight" if upcycling.ROUTER in name else name)
        if source not in stored:
            raise CheckpointError(f"{reader.folder} has no tensor {source}")
        buffer = placements[name].buffer
        return Tensor(getattr(torch, buffer.dtype) if buffer else stored[source].dtype, placements[name].shape, [])

    def compute(name: str) -> torch.Tensor:
        if source := upcycling.source_of(name):
            return upcycling.experts_of(name, reader.read(source), config.model, 0, config.model.num_experts)
        if upcycling.ROUTER in name:
            return upcycling.router_of(name, placements[name], config.model, seed).to(tensors[name].dtype)
        return reader.read(name)

    tensors = {name: entry(name) for name in placements}
    model = upcycling.upcycled_settings(state["config"]["model"], config.model)
    buffers = {name: placed.buffer.combine for name, placed in placements.items() if placed.buffer}
    untrained = {**(state.get("untrained") or {}), "buffers": buffers}
    return Rewritten(tensors, compute, {**state, "config": state["config"] | dict(model=model), "untrained": untrained})


def refuse_broken(config: Config) -> None:
    """Raise SettingsError if the settings of experts cannot work, as a training run does."""
    s = record(replace(config, parallel=Parallel()), 1)  # the layout of the dense run has no say
    broken = out_of_range(config.model).values() or [rule.message(s) for rule in expert_rules.RULES if rule.broken(s)]
    if broken:
        raise SettingsError("these settings cannot work", "\n  ".join(broken))


@torch.no_grad()
def _compared(dense: Path, mixture: Path, config: Config, vocab_size: int) -> str:
    """A notice on the logits of both models. Raises CheckpointError if they differ."""
    prompts = prompts_for(facts_of(config, vocab_size))
    before, after = (load_model(path, precision="fp32").model.logits(prompts) for path in (dense, mixture))
    largest, difference = before.abs().max().item(), (before - after).abs().max().item()
    summary = f"logits differ by at most {difference:.1e} of {largest:.3g}"
    if not difference <= BOUND * max(largest, 1.0):
        raise CheckpointError(f"{mixture} computes something else than {dense}: {summary}")
    return f"the same function: {summary}"
