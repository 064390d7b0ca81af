# SPDX-License-Identifier: Apache-2.0
"""One name for one thing; and the core knows no model by name."""

import ast
import re
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("megatron/**/*.py")}

KNOW_GPT = {  # file pattern -> why it may name GPT
    "megatron/model/gpt/*": "the model itself",
    "megatron/model/bert/*": "made of its attention, its rules and its facts",
    "megatron/model/t5/*": "made of its attention, its rules and its facts",
    "megatron/model/recipe.py": "the table of model types",
    "megatron/settings/dialects/*": "other suites' words",
    "megatron/settings/presets.py": "published shapes",
    "megatron/settings/decoder_shapes.py": "published shapes",
    "megatron/settings/groups/*": "the default of --model-type; names of tokenizers and published shapes",
    "megatron/settings/parse.py": "names of published shapes in messages",
    "megatron/settings/reader.py": "names of published shapes",
    "megatron/settings/messages.py": "names of published shapes in messages",
    "megatron/settings/statements.py": "names of published shapes in docstrings",
    "megatron/model/command_line.py": "the default of --model-type",
    "megatron/settings/rules.py": "names of tokenizers",
    "megatron/settings/general_rules.py": "names of tokenizers",
    "megatron/tokenizer/*": "names of tokenizers",
    "megatron/tasks/chat.py": "what answers in conversations",
    "megatron/tasks/dpo.py": "what answers in conversations",
    "megatron/data/conversations.py": "the name of a role in files of others",
    "megatron/inference/stage_layers.py": "an example of a shape",
    "megatron/training/datasets.py": "the module of Megatron-LM's order of samples makes --mock-data",
    "megatron/data/gpt_dataset.py": "Megatron-LM's name of this order of samples",
    "megatron/data/masked_dataset.py": "the module of that order divides and mixes files",
    "megatron/data/find_documents.py": "reads the maps of that order of samples backwards",
    "megatron/training/document_trace.py": "reads the maps of that order of samples backwards",
    "megatron/data/epochs.py": "the module of that order says what is read",
    "megatron/convert/*": "models of other programs",
    "megatron/convert/export/*": "models of other programs",
    "megatron/training/conversion_commands.py": "models of other programs",
    "megatron/model/kinds/*/settings.py": "gpt-oss, whose arithmetic settings have",
    "megatron/model/kinds/*/hf.py": "names in files of Hugging Face",
    "megatron/planner/calibrate.py": "the layer that is measured",
    "megatron/planner/published.py": "models of published runs",
    "megatron/planner/target.py": "GPT-2's vocabulary is assumed where none is given",
    "megatron/planner/parity.py": "the module of Megatron-LM's order of samples is imported ahead",
    "megatron/guard/command.py": "command lines that users type, in examples",
    "megatron/guard/stacks.py": "a place in the data loader, in an example",
    "megatron/tasks/backbones.py": "the table of models that fine-tuning knows",
    "megatron/tools/*": "commands name it for users",
}


def test_no_public_class_is_named_twice():
    places = defaultdict(list)
    for name, text in SOURCES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert len(places) > 100
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_only_these_files_know_gpt():
    naming = {name for name, text in SOURCES.items() if re.search("gpt(?!q)", text, re.IGNORECASE)}  # GPTQ is none
    allowed = {name for name in naming if any(fnmatch(name, pattern) for pattern in KNOW_GPT)}
    assert naming - allowed == set()
    assert [pattern for pattern in KNOW_GPT if not any(fnmatch(name, pattern) for name in naming)] == []


def test_units_say_what_they_are():
    """Nothing reads the kind of a parameter off the beginning of its name."""
    assert [name for name, text in SOURCES.items() if re.search(r"startswith\(\(?[\"']blocks", text)] == []


def test_the_core_names_no_kind_of_layer():
    """A kind is its folder: what builds, plans, updates, saves and decodes layers asks `KINDS`."""
    core = (
        "model model/gpt/module.py planner planner/preflight pipeline optimizer checkpoint mpu inference data".split()
    )
    may = {  # experts: their choices are replayed in comparisons, and their number is cut
        "megatron/planner/parity.py",
        "megatron/inference/prune.py",
        "megatron/model/pruning.py",
        "megatron/model/gpt/module.py",  # masks of documents for attention
    }
    names = [path.name for path in (ROOT / "megatron" / "model" / "kinds").iterdir() if (path / "kind.py").exists()]
    assert len(names) >= 7
    imported = re.compile(rf"model\.kinds\.({'|'.join(names)})\b|\b(gdn|mamba|mla)\b", re.IGNORECASE)
    found = {
        name: match[0]
        for name, text in SOURCES.items()
        if {name, str(Path(name).parent)} & {f"megatron/{place}" for place in core} and name not in may
        if (match := imported.search(text))
    }
    assert found == {}
