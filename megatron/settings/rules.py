# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of settings: tables that are checked in one pass, so all violations are reported together.

`general_rules` has those that need no other package; `data/data_rules.py`, `optimizer/optimizer_rules.py`,
`pipeline/pipeline_rules.py` and each recipe have their own, and `training/rules.py` checks all of them. Rules are pure;
files are checked when they are opened.
A rule sees all settings under their own names in one record `s`, together with `s.world` (ranks), `s.dp` (data parallel
ranks) and `s.head` (width of a head).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType, SimpleNamespace

from megatron.settings import schema
from megatron.settings.declare import Range, dashed
from megatron.settings.rank_env import launch_command
from megatron.settings.spelling import settings_of
from megatron.settings.statements import Statement


def tokenizer_type(t: schema.TokenizerSettings, data: schema.Data) -> str | None:
    """The tokenizer type that the given files imply, as in Megatron-LM; numbers for data without files. None: unclear."""
    if t.vocab_file and t.merge_file:
        return "GPT2BPETokenizer"
    numbers = data.mock_data or not data.files
    return "NullTokenizer" if numbers and t.vocab_size and not t.tokenizer_model else None


def word_piece(said: Mapping[str, Statement]) -> str | None:
    """The tokenizer type of a --vocab-file alone in pretrain_bert.py and pretrain_t5.py, as in Megatron-LM."""
    values = {name: said[name].value for name in ("vocab_file", "merge_file", "tokenizer_model") if name in said}
    alone = any(values.values()) and not values.get("merge_file") and not values.get("tokenizer_model")
    return "BertWordPieceLowerCase" if alone and not str(values["vocab_file"]).endswith(".json") else None


# Ranges of single values ----------------------------------------------------------------------------------------------

LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
REPLICAS = ("sharding_degree", "dp_degree")


@cache
def _ranges() -> dict[str, Range]:
    """Setting of pretraining -> its range. A command's own setting of the same name has the same range."""
    return {one.name: one.range for one in settings_of(schema.GROUPS) if one.range}


def range_problem(name: str, value: object) -> str:
    """What a value must be, if it is out of the setting's range; "" if it is not, or is no number."""
    known = _ranges().get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"must be {known.words}" if known and is_number and not known.holds(value) else ""


def out_of_range(group, given: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """field -> problem, for values of a group of settings that are invalid regardless of the others.

    given: `Config.given_words`
    """
    wrong = {}
    for one in settings_of({"": type(group)}):
        known, value = one.range or _ranges().get(one.name), getattr(group, one.name)
        for part in value if one.many and value else [value]:
            if known and part is not None and not known.holds(part):
                wrong[one.name] = f"{given.get(one.name, f'{dashed(one.name)} {value}')} must be {known.words}"
    return wrong


def said(s: SimpleNamespace, name: str) -> str:
    """A setting and its value as the user wrote them: `--max-steps 0`."""
    given = s.settings.given(name)
    return given.words if given else f"{dashed(name)} {getattr(s, name)}"


# Settings that depend on each other -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A rule: `broken(s)` is true if the settings cannot work; `message(s)` says so, with values that do."""

    broken: Callable[[SimpleNamespace], object]
    message: Callable[[SimpleNamespace], str]


def record(settings: schema.Config, world: int) -> SimpleNamespace:
    """The record that rules see: all settings under their own names, and numbers derived from them."""
    groups = (getattr(settings, name) for name in schema.GROUPS)  # a recipe's own kinds may have added settings
    s = SimpleNamespace(**{f.name: getattr(group, f.name) for group in groups for f in fields(group)})
    s.tp, s.pp, s.cp = s.tensor_model_parallel_size, s.pipeline_model_parallel_size, s.context_parallel_size
    s.settings, s.world, s.model_ranks = settings, world, s.tp * s.pp * s.cp
    s.cp_comm = settings.parallel.cp_comm_types if s.cp > 1 else ()
    s.cp_inner = max(1, (settings.parallel.cp_levels or (1,))[0])  # ranks that exchange rows for heads with a2a+p2p
    s.row_pieces = s.cp * math.lcm(2 if s.cp > 1 else 1, s.tp if s.sequence_parallel else 1)
    s.dp = max(1, world // s.model_ranks)
    s.steps = settings.batch.steps(s.dp)
    s.sharding_ranks = s.sharding_degree or (s.dp if s.sharding_stage else 1)
    s.head = s.kv_channels or max(1, s.hidden_size // s.num_attention_heads)
    s.groups, s.ffn = s.num_query_groups or s.num_attention_heads, settings.model.ffn_size
    s.host_share = settings.optimizer.host_share
    s.rotary = int(s.head * s.rotary_percent)
    s.paths = [name for name in ("train", "valid", "test") if getattr(s, f"{name}_data_path")]
    s.tokenizer = s.tokenizer_type or tokenizer_type(settings.tokenizer, settings.data)
    return s


# Words for the rules --------------------------------------------------------------------------------------------------


def of_the_checkpoint(s: SimpleNamespace) -> str:
    """The end of a message that no vocabulary is given, where a checkpoint may have one."""
    taken = "its shape and vocabulary are taken where no size of the model is given"
    return f", or that of {s.load}: {taken}" if s.load else ""


def alone(s: SimpleNamespace) -> bool:
    """Whether this is a single process that no launcher started."""
    return s.world == 1 and not (s.dry_run or s.preflight or s.world_size)


def ranks_needed(s: SimpleNamespace) -> int:
    """The smallest number of ranks of the given layout."""
    return s.model_ranks * math.prod(getattr(s, name) or 1 for name in REPLICAS)


def too_few(s: SimpleNamespace, sizes: str, ranks: int) -> str:
    """The message for a process that is alone, and needs `ranks` ranks for these sizes."""
    return f"{sizes}: {ranks} ranks are needed, and this process is alone{start_them(s, ranks)}"


def start_them(s: SimpleNamespace, ranks: int) -> str:
    """The end of a message about missing ranks: how to start them, or to plan for them."""
    if ranks > 1 and s.world == 1 and s.dry_run and not s.world_size:
        return f"; to plan for them: --world-size {ranks}"
    return f"; start them: {launch_command(ranks)}" if alone(s) and ranks > 1 else ""


def ranks_in_words(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"


def multiples(value: int, of: int) -> list[int]:
    """The multiples of `of` below and above a value."""
    return [n for n in (value // of * of, value // of * of + of) if n]


def divisors(of: int, near: float) -> list[int]:
    """The two nearest divisors of a number."""
    return sorted(sorted((n for n in range(1, of + 1) if of % n == 0), key=lambda n: abs(n - near))[:2])


def either(values: Iterable[int]) -> str:
    return " or ".join(map(str, values))
