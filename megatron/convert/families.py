# SPDX-License-Identifier: Apache-2.0
"""The models that can be converted to and from Hugging Face transformers: their tensors, their settings, and how to run
both models on the same tokens for comparison.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import torch

from megatron.convert.hf_blocks import is_fp8
from megatron.convert.watched_config import WatchedConfig
from megatron.errors import CheckpointError, SettingsError
from megatron.model.bert import hf_names as bert_names
from megatron.model.bert.facts import BertFacts
from megatron.model.bert.settings import GROUP as BERT
from megatron.model.facts import AHEAD, Facts
from megatron.model.gpt import hf_ahead, hf_falcon
from megatron.model.gpt import hf_families as gpt_families
from megatron.model.gpt import hf_names as gpt_names
from megatron.model.gpt import hf_settings as gpt_settings
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.hf_hybrid import ANY_STEP, letters_ahead
from megatron.model.hf_match import MIXERS, Match
from megatron.model.hybrid_names import is_transformer
from megatron.model.recipe import computes_its_own, facts_of, recipe_of
from megatron.model.t5 import hf_names as t5_names
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.settings import GROUP as ENCODER_DECODER
from megatron.settings.schema import Config, Model

# Keys of config.json that are not converted -> the flag of pretraining
OF_TRAINING = dict(router_aux_loss_coef="--moe-aux-loss-coeff")
NOTHING = re.compile(r"(?!)")  # no name
PROMPT = 48  # most tokens of a comparison
LEFT_OUT = f"the weights {AHEAD}.* are left out: the depths of {hf_ahead.FLAG} serve training, and "
COPIED = (
    "lm_head.weight is a copy of the embedding: theirs divides by the root of the width before a tied output layer, and "
    "this model, without --scale-tied-output, does not"
)
FOLDED = "{} of config.json: multiplied into the weights, and an export of them has no multipliers"


@dataclass(frozen=True)
class Family:
    """A model in both libraries, and the mapping between them.

    facts:    facts of our model
    matches:  pairs of tensors
    theirs:   (end-of-document id or None, dtype of the weights) -> content of config.json
    ours:     (loaded model, prompts [s, b]) -> outputs to compare
    run:      (transformers, folder, prompts, keywords of from_pretrained) -> the same outputs of their model; None: it has
              no such model
    extra:    the model's own groups of settings
    table:    their embedding; head: their output layer, which is a copy of it, or one of `matches`
    copies:   their tensors that files may have beside another with the same values -> the other
    optional: more of them, under whose names files do not have the other
    constants: names of tensors of old files that transformers computes
    unused:   names of tensors that transformers leaves out of this model
    notices:  notices for the user of an export, or of an import
    unread:   keys of an imported config.json that have no counterpart here
    """

    kind: str
    facts: Facts
    matches: list[Match]
    theirs: Callable[[Optional[int], str], dict[str, Any]]
    ours: Callable[[Any, torch.Tensor], torch.Tensor]
    run: Optional[Callable[..., torch.Tensor]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    table: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    copies: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    constants: re.Pattern[str] = NOTHING
    unused: re.Pattern[str] = NOTHING
    notices: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """Of the comparison of both models (`agreement.LIMITS`)."""
        return "hf with states" if self.facts.with_states else "hf"

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.head in self.copies

    def unread_notices(self, path: Any) -> list[str]:
        """Notices on the keys of config.json that were not read."""
        notices = [
            f"{path}: {key} is a setting of training, and is not converted: to train on, give {OF_TRAINING[key]}"
            for key in self.unread
            if key in OF_TRAINING
        ]
        others = [key for key in self.unread if key not in OF_TRAINING]
        known = "is not known here and has" if len(others) == 1 else "are not known here and have"
        return notices + [f"{path}: {', '.join(others)} {known} no effect"] * bool(others)


def exported(config: Config, vocab_size: int) -> Family:
    """The family of a pretrained model, or one fine-tuned with a pattern.

    Raises SettingsError if transformers has no model of its shape, or the module is a user's own.
    """
    if computes_its_own(recipe_of(config)):
        raise SettingsError(
            f"model type {config.model.model_type}: other libraries have no such model",
            "its file may compute something else from the same tensors",
            "python -m megatron.tools.export --format onnx or torch-export writes a program of it",
        )
    if config.model.letters and not names_layers(config):
        raise SettingsError(
            f"--hybrid-layer-pattern {config.model.letters}: other libraries do not name layers so",
            do="train or load it as layers of attention and MLP, with --num-layers in the place of the pattern",
        )
    facts = facts_of(config, vocab_size)
    if isinstance(facts, T5Facts):
        t5_names.refuse_other(facts)
        notices = (COPIED,) if t5_names.copies_table(facts) else ()
        return replace(_t5(facts), matches=t5_names.exported(facts), notices=notices)
    if isinstance(facts, BertFacts):
        bert_names.refuse_other(facts)
        return _bert(facts)
    family = _gpt(GPTFacts.of(config, vocab_size))
    why = hf_ahead.reason(family.kind, config.model) if config.model.depths else ""
    return replace(_with_copies(family), notices=(*family.notices, LEFT_OUT + why) if why else family.notices)


def _with_copies(family: Family) -> Family:
    """The family with the copies of tables that files have for depths of multi-token prediction."""
    own = hf_ahead.copies(family.kind, family.facts.settings)
    return replace(family, matches=[*family.matches, *(Match(ours, (theirs,)) for theirs, ours in own.items())])


def adapted(config: Config, vocab_size: int) -> Family:
    """`exported`, of a model whose adapters belong to the published weights. Raises SettingsError if ours are others."""
    family = exported(config, vocab_size)
    if family.kind == hf_falcon.KIND:
        raise SettingsError(
            f"adapters of a {family.kind} are not converted",
            "its published weights have multipliers in config.json, which are in the weights here",
            "python -m megatron.tools.checkpoint merge-lora, then to-hf, write a whole model",
        )
    return family


def names_layers(config: Config) -> bool:
    """Whether there is a family of models whose layers a pattern lists, as this one's."""
    return any(not family.reasons(config.model) for family in gpt_families.FAMILIES.values() if config.model.letters)


def knows_layers(config: Config) -> bool:
    """`names_layers`. Raises SettingsError for a pattern of neither, with what the nearest families lack."""
    if names_layers(config):
        return True
    if config.model.letters and not is_transformer(config):
        try:
            gpt_families.kind_of(config.model)
        except SettingsError as error:
            raise SettingsError(
                f"--hybrid-layer-pattern {config.model.letters}: Hugging Face knows layers of attention and MLP, in turn, "
                "and families with others",
                error.why,
                "it trains, evaluates and generates in this suite",
            ) from None
    return False


def imported(settings: dict[str, Any], tied: Optional[bool] = None, depths: int = 0) -> Family:
    """The family of a Hugging Face folder, from its config.json. Raises CheckpointError for unsupported models.

    tied: whether the output layer is the embedding; None: as config.json says. depths: of multi-token prediction to import
    """
    watched = WatchedConfig(settings)
    return replace(_imported(watched, tied, depths), unread=tuple(watched.unread()))


def _imported(settings: dict[str, Any], tied: Optional[bool], depths: int) -> Family:
    kind = settings.get("model_type")
    if depths and kind in ("t5", "bert"):
        raise CheckpointError(f"{hf_ahead.FLAG} {depths} of a {kind}: it predicts no tokens further ahead")
    if kind == "t5":
        model, own, vocab_size, scaled = t5_names.our_settings(settings, tied)
        family = _t5(T5Facts(model, vocab_size, own))
        return replace(family, matches=t5_names.with_scaled_head(family.matches, model)) if scaled else family
    settings = settings if tied is None else settings | dict(tie_word_embeddings=tied)
    if kind == "bert":
        model, own, vocab_size = bert_names.our_settings(settings)
        return _bert(BertFacts(model, vocab_size, own))
    known, model, vocab_size = gpt_settings.our_settings(settings, others=("t5", "bert"))
    letters = letters_ahead(settings) if depths and known == "nemotron_h" else ""
    settings.get("num_nextn_predict_layers")  # known: depths are those that were asked for
    family = _gpt(GPTFacts(hf_ahead.with_depths(known, model, depths, letters), vocab_size), known)
    if known == hf_falcon.KIND and (names := hf_falcon.are_multiplied(settings)):
        matches = hf_falcon.folded(family.matches, settings, model)
        family = replace(family, matches=matches, notices=(FOLDED.format(", ".join(names)),))
    return family if known == kind and not is_fp8(settings) else replace(family, run=None)


def prompts_for(facts: Facts) -> torch.Tensor:
    """Fixed token ids [s, b] for comparisons."""
    longest = facts.settings.context_length
    generator = torch.Generator().manual_seed(20240229)
    return torch.randint(facts.vocab_size, (min(longest, PROMPT), 3), generator=generator)


# ---- decoders --------------------------------------------------------------------------------------------------------


def _gpt(facts: GPTFacts, kind: Optional[str] = None) -> Family:
    model = facts.settings
    kind = kind or gpt_families.kind_of(model)
    table = {"gpt2": "transformer.wte.weight"} | dict.fromkeys(MIXERS, "backbone.embeddings.weight")
    table = table.get(kind, "model.embed_tokens.weight")
    tied = not model.untie_embeddings_and_output_weights
    constants = r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias" if kind == "gpt2" else r".*\.rotary_emb\.inv_freq"

    def run(transformers, folder, prompts, **more):
        plain = dict(dtype=torch.float32, attn_implementation="eager")  # the only attention there with soft caps
        plain |= dict(time_step_min=ANY_STEP) if kind == "nemotron_h" else {}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **plain, **more).eval()
        return theirs(prompts.t()).logits.transpose(0, 1)

    return Family(
        kind,
        facts,
        gpt_names.matches(kind, model),
        lambda end, dtype: gpt_settings.their_settings(model, facts.vocab_size, end, dtype),
        lambda ours, prompts: ours.logits(prompts),
        None if kind == "deepseek" else run,
        table=table,
        copies={"lm_head.weight": table} if tied else {},
        optional=_copies_ahead(kind, model, table),
        constants=re.compile(constants),
        unused=hf_ahead.unused(kind, model),
    )


def _copies_ahead(kind: str, model: Model, table: str) -> dict[str, str]:
    """The copies of tables that depths of multi-token prediction have in files -> the name of the table."""
    theirs = {"embedding.word.weight": table, "output.weight": "lm_head.weight"}
    return {name: theirs[ours] for name, ours in hf_ahead.copies(kind, model).items()}


# ---- T5 --------------------------------------------------------------------------------------------------------------


def _t5(facts: T5Facts) -> Family:
    def run(transformers, folder, prompts, **more):
        theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, **more).eval()
        source, target = _halves(prompts)
        return theirs(input_ids=source.t(), decoder_input_ids=target.t()).logits.transpose(0, 1)

    def their_settings(end, dtype):
        ids = dict(pad_token_id=0, decoder_start_token_id=0, eos_token_id=1 if end is None else end)
        return t5_names.their_settings(facts, ids, dtype)

    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) * facts.tied))
    cross = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"  # in old files
    return Family(
        "t5",
        facts,
        t5_names.matches("t5", facts),
        their_settings,
        lambda ours, prompts: ours.logits(*_halves(prompts)),
        run,
        extra={ENCODER_DECODER: facts.own},
        table="shared.weight",
        copies=dict.fromkeys(copies, "shared.weight"),
        unused=re.compile(cross),
    )


def _halves(prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split prompts: 2/3 of the tokens are the source, the others the target."""
    cut = 2 * len(prompts) // 3
    return prompts[:cut], prompts[cut:]


# ---- BERT ------------------------------------------------------------------------------------------------------------


def _bert(facts: BertFacts) -> Family:
    second = facts.own.bert_binary_head

    def run(transformers, folder, prompts, **more):
        kind = transformers.BertForPreTraining if second else transformers.BertForMaskedLM
        theirs = kind.from_pretrained(folder, dtype=torch.float32, **more).eval()
        found = theirs(input_ids=prompts.t(), token_type_ids=_types(prompts).t())
        if not second:
            return found.logits.transpose(0, 1)
        return torch.cat((found.prediction_logits.flatten(), found.seq_relationship_logits.flatten()))

    def ours(model, prompts):
        words = model.logits(prompts, types=_types(prompts))
        if not second:
            return words
        follows = model.follows(prompts, types=_types(prompts))
        return torch.cat((words.transpose(0, 1).flatten(), follows.flatten()))

    table, head = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    of_words = {"cls.predictions.bias", "cls.predictions.decoder.bias"} - {bert_names.bias_of_words(facts)}
    copies = {**({head: table} if facts.tied else {}), **dict.fromkeys(of_words, bert_names.bias_of_words(facts))}
    second_head = r"(bert\.pooler\.dense|cls\.seq_relationship)\.(weight|bias)"
    return Family(
        "bert",
        facts,
        bert_names.matches(facts),
        lambda end, dtype: bert_names.their_settings(facts, dtype),
        ours,
        run,
        extra={BERT: facts.own},
        table=table,
        head=head,
        copies=copies,
        constants=re.compile(r"bert\.embeddings\.position_ids"),
        unused=NOTHING if second else re.compile(second_head),
    )


def _types(prompts: torch.Tensor) -> torch.Tensor:
    """Token types for prompts: the second half is another sentence."""
    return (torch.arange(len(prompts)) >= len(prompts) // 2).long().unsqueeze(1).expand_as(prompts)
