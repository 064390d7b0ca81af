# SPDX-License-Identifier: Apache-2.0
"""Every spelling of every setting arrives, from every source, and the last word counts.

What a spelling means is read off the fields here, by rules of this file (`Word`), not by those of the suite. Each case is a
command line with its files; it ends with the value that its words mean, or with an error that names both of them.
"""

import json
import re
import typing
from dataclasses import MISSING, dataclass, fields
from itertools import permutations, product

import pytest

from megatron.errors import Failure, UsageError
from megatron.model.command_line import parse_any
from megatron.model.recipe import named_recipe
from megatron.settings import from_checkpoint
from megatron.settings.parse import parse, parse_pretrain
from megatron.settings.reader import SHAPE as DECIDED
from megatron.settings.schema import GROUPS, Model, TokenizerSettings, setting
from megatron.tasks import finetune
from megatron.tools.evaluate import EvaluateOptions
from megatron.tools.plan import PlanOptions
from megatron.training.rules import check, idle

SHAPE = dict(num_layers="2", hidden_size="8", num_attention_heads="2")
TRUE, FALSE = ("true", "True", "yes", "on", "1", "ON"), ("false", "FALSE", "no", "off", "0", "Off")
OWN_TESTS = {"parallel_plan"}  # a file that has to be there: tests/planner/test_choices.py


@dataclass(frozen=True)
class Word:
    """A spelling with words that it may have, and what they mean: `value`; ... where they say only what it is not."""

    flag: str
    words: tuple[str, ...]
    value: object
    not_value: object = None
    yields: bool = False
    off: bool = False
    decides: bool = False  # a switch that is off

    @property
    def line(self) -> list[str]:
        return [self.flag, *self.words]


def plain(hint):
    """(type or choices, whether it is a list) of a field."""
    args = [one for one in typing.get_args(hint) if one is not type(None)]
    if typing.get_origin(hint) is typing.Union or type(None) in typing.get_args(hint):
        return plain(args[0])
    if typing.get_origin(hint) is list:
        return plain(args[0])[0], True
    return (args, False) if typing.get_origin(hint) is typing.Literal else (hint, False)


def read(kind, text: str):
    """A word as the value of a kind."""
    if kind is bool:
        return text.lower() in ("true", "yes", "on", "1")
    if isinstance(kind, list):
        return next(choice for choice in kind if str(choice).lower() == text.lower())
    return int(float(text)) if kind is int else kind(text)


def samples(kind, many: bool, default, name: str) -> list[tuple[tuple[str, ...], object]]:
    """Words, and the values that they mean."""
    if name in ("model_name_or_path", "model_type"):
        return [(("gpt2",), "gpt2")] if name == "model_name_or_path" else [(("some.module",), "some.module")]
    if kind is bool:
        return [((word,), True) for word in TRUE] + [((word,), False) for word in FALSE] + [((), True)]
    numbers = {int: ["7", "1e3"], float: ["0.25", "3e-4"], str: ["a/b", "x1"]}
    words = [str(one) for one in kind] if isinstance(kind, list) else numbers[kind]
    if many:
        return [(tuple(words[:1]), [read(kind, words[0])]), (tuple(words[:2]), [read(kind, one) for one in words[:2]])]
    return [((word,), read(kind, word)) for word in words]


def words_of(group: type, field) -> list[Word]:
    """Every spelling of a field with its words."""
    name, default = field.name, field.default
    kind, many = plain(typing.get_type_hints(group)[name])
    dashed = "--" + name.replace("_", "-")
    found = []
    for alias in (dashed, *field.metadata.get("alias", ())):
        flag, equals, meaning = alias.partition("=")
        yields, flag = flag.endswith("~"), flag.rstrip("~")
        if not equals:
            found += [Word(flag, said, value, off=value is False) for said, value in samples(kind, many, default, name)]
            continue
        on, slash, off = meaning.partition("/")
        value = read(kind, field.metadata.get("also", {}).get(on, on))
        without = ... if kind is not bool and not slash else default if slash and not off else None
        if kind is bool:
            without = not value
        elif slash and off:
            without = read(kind, off)
        found += [Word(flag, said, value, yields=yields) for said in ((), ("true",), ("yes",))]
        given = dict(yields=yields and without is ..., off=True, decides=yields and without is not ...)
        found += [Word(flag, (said,), without, value, **given) for said in ("false", "0")]
    if kind is bool and not name.startswith("no_"):
        negated = "--no-" + name.replace("_", "-")
        found += [Word(negated, said, said == ("false",), off=True) for said in ((), ("true",), ("false",))]
    return found


SETTINGS = [
    (group, field) for group in GROUPS.values() for field in fields(group) if field.name not in {*OWN_TESTS, *SHAPE}
]
NAMES = [field.name for _, field in SETTINGS]


def value_of(config, name: str):
    return next(getattr(group, name) for group in config.groups.values() if hasattr(group, name))


def start_of(field):
    return None if field.default is MISSING else field.default


@pytest.mark.sampled(10)
@pytest.mark.parametrize("group, field", SETTINGS, ids=NAMES)
def test_each_spelling_arrives_from_each_source(group, field, tmp_path):
    shape = [part for name, value in SHAPE.items() for part in (f"--{name}", value)]
    yaml, python, data = tmp_path / "run.yaml", tmp_path / "run.py", tmp_path / "run.json"
    for word in words_of(group, field):
        expected = start_of(field) if word.value is ... else word.value
        key = word.flag[2:].replace("-", "_")
        said = list(word.words)
        joined = [f"{word.flag}={said[0]}"] if len(said) == 1 else word.line
        sources = {"line": word.line, "equals": joined, "underscores": [f"--{key}", *said]}
        if said:
            text = f"[{', '.join(said)}]" if len(said) > 1 else said[0]
            yaml.write_text(f"group:\n  {key}: {text}\n")
            data.write_text(json.dumps({key: said if len(said) > 1 else said[0]}))
            python.write_text(f"{key} = {said if len(said) > 1 else said[0]!r}\n")
            sources |= {"yaml": ["--config", str(yaml)], "json": ["-c", str(data)], "python": ["-c", str(python)]}
            sources["-o"] = ["-o", f"{key}={','.join(said)}"]
        for source, line in sources.items():
            if source == "-o" and len(said) > 1:
                continue  # a list of -o is that of YAML: tests/settings/test_fleetx.py
            config = parse_pretrain([*shape, *line])
            found = value_of(config, field.name)
            assert found == expected and type(found) is type(expected), (word, source, found)
            if word.value is not ...:
                given = config.given(field.name)
                assert given is not None and given.value == expected, (word, source)
                assert given.flag == word.flag and (source != "yaml" or f"{yaml}:2" in given.words)


def meant(first: Word, second: Word, same_source: bool, default):  # noqa: C901
    """The values that may come of two words in order. None of them: the two contradict each other."""
    if same_source and first.decides != second.decides and not (first.yields or second.yields):
        return [first.value if first.decides else second.value]
    if second.value is ...:  # not this value
        drops = first.flag == second.flag or not second.yields and first.value == second.not_value
        return [default if drops or first.value is ... else first.value]
    if first.value is ... or not same_source or first.flag == second.flag:
        return [second.value]
    if first.off or second.off or first.value == second.value:
        return [second.value]
    if second.yields != first.yields:  # to a word that says more; the default says less
        found = first.value if second.yields else second.value
        return [found] if found != default else []
    return []


@pytest.mark.sampled(10)
@pytest.mark.parametrize("group, field", SETTINGS, ids=NAMES)
def test_the_last_word_counts(group, field, tmp_path, capsys):
    """Two words of each spelling with each other, on the line, and over a file. A note names the one that is replaced."""
    shape = [part for name, value in SHAPE.items() for part in (f"--{name}", value)]
    few = {}
    for word in words_of(group, field):
        few.setdefault((word.flag, str(word.value)), word)
    path = tmp_path / "run.yaml"
    for first, second in permutations(few.values(), 2):
        allowed = meant(first, second, True, start_of(field))
        capsys.readouterr()
        try:
            found = value_of(parse_pretrain([*shape, *first.line, *second.line]), field.name)
            assert found in allowed, (first, second, found)
            if first.value not in (..., found) and not first.yields:
                assert first.flag in capsys.readouterr().err, (first, second, "no note")
        except UsageError as error:
            assert not allowed and first.flag in str(error) and second.flag in str(error), (first, second)
        if first.words:
            text = f"[{', '.join(first.words)}]" if len(first.words) > 1 else first.words[0]
            path.write_text(f"{first.flag[2:].replace('-', '_')}: {text}\n")
            found = value_of(parse_pretrain([*shape, *second.line, "-c", str(path)]), field.name)
            assert found in meant(first, second, False, start_of(field)), ("file", first, second, found)


@dataclass(frozen=True)
class Several:
    """Switches of all kinds."""

    plain: bool = setting("off", False, "--also-plain", "--not-plain=false")
    made: bool = setting("on", True, "--made-too")
    kind: typing.Literal["a", "b", "c"] = setting("choice", "a", "--be=b", "--see~=c", "--bee=b/c", "--back=b/")


def test_three_words_in_every_order():
    """Brute force over three words of a group made for it: what two of them mean is applied to the third."""
    for field in fields(Several):
        words = list({(word.flag, str(word.value)): word for word in words_of(Several, field)}.values())
        for three in product(words, repeat=3):
            if len({word.flag for word in three}) < 3 and any(word.yields for word in three):
                continue
            after = max((n for n, word in enumerate(three, 1) if word.off and word.value is not ...), default=0)
            positive = {str(word.value) for word in three[after:] if word.value is not ...}
            line = [part for word in three for part in word.line]
            try:
                found = getattr(parse(line, {"several": Several})["several"], field.name)
            except UsageError as error:
                assert len(positive) > 1 and "contradict" in str(error), line
                continue
            last = [word for word in three[after:] if not word.yields][-1:] or three[-1:]
            if last[0].value is not ...:
                assert found == last[0].value, line
            elif last[0].flag != "--see":  # which takes back its own word alone
                assert found != last[0].not_value, line


OWN_OF_EVALUATE = {f.name for f in (*fields(EvaluateOptions), *fields(TokenizerSettings))}
FOREIGN = [name for name in NAMES if name not in OWN_OF_EVALUATE | DECIDED]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_tool_names_what_it_has_no_use_for(name, tmp_path, capsys):
    """On its line it is an error; in a file, which may serve several commands, a note with its place."""
    groups = dict(evaluate=EvaluateOptions, tokenizer=TokenizerSettings)
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=re.escape(flag)):
        parse(["--load", "x", flag, "1"], groups)
    path = tmp_path / "run.yaml"
    path.write_text(f"load: x\n{name}: 1\n")
    parse(["--config", str(path)], groups)
    assert f"{path.name}:2: {name}" in capsys.readouterr().err


def test_a_tool_compares_what_is_said_of_a_model(tmp_path, capsys, monkeypatch):
    """Every word for a setting that a checkpoint decides arrives at the comparison with it, from the line and a file."""
    groups = dict(evaluate=EvaluateOptions, tokenizer=TokenizerSettings)
    compared = []
    monkeypatch.setattr(from_checkpoint, "refuse_another_shape", lambda shape, chosen: compared.append(shape))
    path = tmp_path / "run.yaml"
    for field in fields(Model):
        for word in words_of(Model, field) if field.name in DECIDED - OWN_OF_EVALUATE else ():
            path.write_text(f"{word.flag[2:].replace('-', '_')}: {' '.join(word.line[1:]) or 'true'}\n")
            for line in (word.line, ["--config", str(path)]):
                compared.clear()
                parse(["--load", "x", *line], groups)
                [found] = compared or [{}]
                if word.value is not ...:
                    assert found[field.name].value == word.value, line
                else:
                    assert not found, line
    assert not capsys.readouterr().err


FILES_AND_SHAPES = """task backbone pooling pretrained_checkpoint encoder_num_layers decoder_num_layers
    pipeline_model_parallel_split_rank encoder_pipeline_model_parallel_size""".split()


@pytest.mark.parametrize("recipe", ["GPT", "T5", "BERT", "finetune", "megatron.tasks.chat"])
def test_settings_of_each_recipe_arrive(recipe):
    """The groups that a recipe has of its own, and those of a tool next to them, both values of every switch."""
    made = finetune.recipe() if recipe == "finetune" else named_recipe(recipe)
    start = ["--encoder-num-layers", "2", "--decoder-num-layers", "2"] if recipe == "T5" else ["--num-layers", "2"]
    start += ["--hidden-size", "8", "--num-attention-heads", "2"] + ["--task", "SST2"] * (recipe == "finetune")
    start += ["--task", "chat"] * (recipe == "megatron.tasks.chat")
    for group in {**made.groups, "plan": PlanOptions}.values():
        for field in fields(group):
            for word in {(one.flag, str(one.value)): one for one in words_of(group, field)}.values():
                of_files = recipe == "finetune" and plain(typing.get_type_hints(group)[field.name])[0] is str
                if of_files or field.name in FILES_AND_SHAPES:
                    continue  # tests/tasks, tests/models/test_t5_planner.py
                config = parse_any([*start, *word.line], {"plan": PlanOptions}, recipe=made)
                given = config.given(field.name)
                assert given is not None and given.value == word.value, word


# The settings of a network that all layers of T5 and BERT use; others are refused, or named as without effect.
USED = set(
    """hidden_size seq_length max_position_embeddings ffn_hidden_size kv_channels position_embedding_type normalization
    norm_epsilon swiglu squared_relu bias_gelu_fusion disable_bias_linear quantization lora_rank
    untie_embeddings_and_output_weights attn_logit_softcapping final_logit_softcapping hidden_dropout attention_dropout
    label_smoothing z_loss_coeff init_method_std make_vocab_size_divisible_by""".split()
)
OF_SIZE = {"T5": "--encoder-num-layers 2 --decoder-num-layers 2 --decoder-seq-length 8", "BERT": "--num-layers 2"}
JOB = "--hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 90 --train-iters 2 --lr 1"


@pytest.mark.parametrize("model, more", [("T5", set()), ("BERT", {"num_layers", "model_name_or_path"})])
def test_a_network_uses_or_refuses_or_names_each_setting(model, more):
    recipe, used = named_recipe(model), set()
    for field in fields(Model):
        for word in words_of(Model, field):
            try:
                config = parse_any([*JOB.split(), *OF_SIZE[model].split(), *word.line], recipe=recipe)
                said, named = check(config, 1), idle(config, 1)
            except Failure:
                continue
            flags = {"--" + field.name.replace("_", "-"), word.flag}
            changes = word.value is not ... and getattr(config.model, field.name) != start_of(field)
            if changes and field.name not in named and not any(flag in line for flag in flags for line in said):
                used.add(field.name)
    assert used == USED | more, "refuse what a layer of the model does not use: settings.py of t5 and bert"


def test_a_misspelt_or_impossible_default_of_a_recipe_is_an_error():
    for defaults, words in (
        (dict(num_workerz=1), "defaults of the recipe: there is no setting num_workerz; did you mean num_workers?"),
        (dict(lr_decay_style="cosin"), "the recipe: lr_decay_style 'cosin' is none of"),
        (dict(num_workers=1.5), "the recipe: num_workers '1.5' is not a whole number"),
        (dict(swiglu="perhaps"), "the recipe: swiglu 'perhaps' is neither true nor false"),
    ):
        with pytest.raises(UsageError, match=re.escape(words)):
            parse_pretrain([part for name, value in SHAPE.items() for part in (f"--{name}", value)], defaults=defaults)


def test_the_record_says_who(tmp_path):
    """Default, recipe, preset, file, command and derived, each by its name."""
    path = tmp_path / "run.yaml"
    path.write_text("lr: 0.5\nsequence_parallel: no\n")
    config = parse_pretrain(
        ["--preset", "gpt2", "--config", str(path), "--tp", "1", "--bf16"], defaults=dict(num_workers=1, lr=9.0)
    ).derive("--auto-parallel", micro_batch_size=4)
    origins = {
        "seed": None,
        "num_workers": "the recipe",
        "num_layers": "preset gpt2",
        "lr": f"{path}:1",
        "sequence_parallel": f"{path}:2",
        "tensor_model_parallel_size": "--tp",
        "precision": "--bf16",
        "micro_batch_size": "--auto-parallel",
    }
    found = {name: one and one.origin for name in origins if (one := config.said(name)) or True}
    assert found == origins
    given = {name for name in origins if config.given(name)}
    assert given == {"lr", "sequence_parallel", "tensor_model_parallel_size", "precision"}
