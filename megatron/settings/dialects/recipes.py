# SPDX-License-Identifier: Apache-2.0
"""Recipes of NeMo 2 and Megatron-Bridge by their names: tables of what they set, commands and scripts that start them.

    nemo llm pretrain --factory "llama3_8b(num_nodes=2)" trainer.max_steps=100
    torchrun --nproc_per_node 8 run_recipe.py --recipe llama32_1b_pretrain_config model.tensor_model_parallel_size=2
    recipe = llm.llama3_8b.pretrain_recipe(num_nodes=2); recipe.trainer.max_steps = 100      (of a script, which is not run)

A recipe becomes settings in the suite's own words; what a command or a script says comes after them and wins.
"""

import ast
import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megatron.errors import UsageError, did_you_mean
from megatron.settings.dialects.shell import Command
from megatron.settings.dialects.start import Script, TranslatedRun, started, started_by
from megatron.settings.dialects.table import Dialect, TheirSetting
from megatron.settings.dialects.translate import Translation, overruled, translate
from megatron.settings.files import read_text

NULL = ("null", "None")  # `none` is a value: of moe_router_load_balancing_type
CALL = re.compile(r"([\w.]+)(?:\((.*)\))?", re.DOTALL)  # llama3_8b, or llama3_8b(num_nodes=2)
RUN = "it would have to be run, which nothing here does: write what it sets as name = value"


@dataclass(frozen=True)
class RecipeTable:
    """The recipes of a suite.

    columns:  short name -> key of the suite
    common:   what all recipes set, key=value
    rows:     a line for each: its names (a|b), the shape here, what it sets besides, short=value or key=value; lines that
              begin with a blank belong to the one before
    models:   shape without a preset here -> its flags
    others:   pattern of names -> why recipes of this kind have no row
    arguments: of the function that makes a recipe -> key
    words:    flag of the suite's command -> key
    """

    columns: Mapping[str, str]
    common: str
    rows: str
    models: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> list[list[str]]:
        """The names of each recipe."""
        return [line.split()[0].split("|") for line in self._lines()]

    def _lines(self) -> list[str]:
        return list(filter(str.strip, re.split(r"\n(?! )", self.rows)))

    @cached_property
    def recipes(self) -> dict[str, tuple[str, dict[str, str]]]:
        """Name -> (shape, key -> value)."""
        found = {}
        for line in self._lines():
            names, shape, *own = line.split()
            values = self._values(self.common.split()) | self._values(own)
            found |= {name: (shape, values) for name in names.split("|")}
        return found

    def _values(self, words: list[str]) -> dict[str, str]:
        pairs = (word.partition("=") for word in words)
        return {self.columns.get(key, key): value for key, _, value in pairs}

    def named(self, name: str) -> str | None:
        """The recipe that this names: `megatron.bridge.recipes.llama.llama3_8b_pretrain_config`, or llama3_8b."""
        last = name.rpartition(".")[2]
        return next((one for one in (last, f"{last}_pretrain_config") if one in self.recipes), None)

    def refusal(self, name: str, title: str) -> UsageError:
        """The error for a name without a row."""
        last = name.rpartition(".")[2]
        why = next((text for pattern, text in self.others.items() if re.search(pattern, last)), None)
        near = difflib.get_close_matches(last, self.recipes, 8, 0.0)
        problem = f"{last}: {why or f'no recipe of {title} that is known'}{did_you_mean(last, near, 0.4)}"
        return UsageError(problem, do=f"{len(self.names)} are known, the nearest: {', '.join(near)}")


@dataclass(frozen=True)
class RecipeRuns:
    """The `own` of a dialect whose runs are recipes.

    keys:     the dialect that knows the suite's words
    command:  starts a recipe; flag: its word before the name
    spelled:  key -> key as `keys` has it
    ranks:    name -> (nodes, GPUs of each), where no launcher says it
    """

    keys: Dialect
    table: RecipeTable
    command: tuple[str, ...]
    flag: str
    spelled: Callable[[str], str] = str
    ranks: Callable[[str], tuple[int, int] | None] = lambda name: None

    def of_command(self, command: Command, script: Script) -> TranslatedRun:
        """A command that names a recipe, and overrides."""
        name, said, found = None, [], Translation()
        words = iter(["".join(shlex.split(word)) or word for word in command.words])
        for word in words:
            flag, equals, value = word.partition("=")
            source = TheirSetting(flag, [value], command.where, word)
            if not flag.startswith("-"):
                if equals:
                    said.append(source._replace(key=flag.lstrip("+")))
                elif word not in ("llm", "pretrain"):
                    found.unknown.append((source, f"no word of {self.keys.title} that is known"))
                continue
            known = flag in (self.flag, "--model", "-f") or flag in self.table.words
            value = value if equals else next(words, "") if known and self.table.words.get(flag, "value") else ""
            source = TheirSetting(flag, [value], command.where, f"{flag} {value}".strip())
            if flag in (self.flag, "--model", "-f"):
                name, more = self._called(value, command.where)
                said = more + said
            elif key := self.table.words.get(flag):
                said.append(source._replace(key=key))
            elif known:
                found.idle.append((source, "it asks how the program itself behaves"))
            else:
                found.unknown.append((source, f"no flag of {self.keys.title}'s command that is known"))
        if name is None:
            raise UsageError(f"{command.where}: {command.program}: no recipe is named", do=f"{self.flag} NAME")
        launched = bool(command.launcher)
        start, notes = started(command, found)
        return self._run(name, said, found, start if launched else None, command.notes + notes, command.behind)

    def of_file(self, path: str, script: Script) -> TranslatedRun:
        """A script that calls a recipe's function and sets its fields. It is read, not run."""
        found, said, name = Translation(), [], None
        for kind, source, why in self._of_python(path):
            if kind == "recipe":
                name = source.value
            elif kind == "set":
                said.append(source)
            else:
                found.lost.append((source, why))
        if name is None:
            raise UsageError(
                f"{path}: no recipe of {self.keys.title} in it", do="a script that calls one by its name is read"
            )
        return self._run(name, said, found, None, [], [])

    def _run(self, name: str, said: list[TheirSetting], found: Translation, start, notes, behind) -> TranslatedRun:
        recipe = self.table.named(name)
        if recipe is None:
            raise self.table.refusal(name, self.keys.title)
        sources = [one._replace(key=self.spelled(one.key)) for one in (*self._of_recipe(recipe), *said)]
        last = {one.key: one for one in sources}
        without = {key: one for key, one in last.items() if one.value in NULL}
        found.idle += [(one, "it has no value") for one in without.values()]
        found.idle += [
            (one, overruled(False, last[one.key])) for one in sources if one.key in without and one is not last[one.key]
        ]
        translate(self.keys, [one for one in sources if one.key not in without], found)
        if start is None and not found.start and (ranks := self.ranks(recipe)):
            start = ["torchrun", "--nnodes", str(ranks[0]), "--nproc-per-node", str(ranks[1])]
        elif start is None and found.start:
            start, told = started_by(found)
            notes = notes + told
        found.idle += [(line.source, f"the command says {' '.join(start)}") for line in found.start]
        found.start = []
        return TranslatedRun(found, start or ["python"], "pretrain_gpt.py", behind, notes)

    def _of_recipe(self, name: str) -> Iterator[TheirSetting]:
        """The settings of a recipe, its model first."""
        shape, values = self.table.recipes[name]
        where = f"recipe {name}"
        if shape in self.table.models:
            words = self.table.models[shape].split()
            yield TheirSetting("shape", words, where, f"the model, {shape}")
        else:
            yield TheirSetting("preset", [shape], where, f"the model, {shape}")
        for key, value in values.items():
            yield TheirSetting(key, value.split("+"), where, f"{key}={value.replace('+', ',')}")

    def _called(self, text: str, where: str) -> tuple[str, list[TheirSetting]]:
        """A name with arguments: (name, what they set)."""
        match = CALL.fullmatch(text)
        if not match:
            raise UsageError(f"{where}: {self.flag} {text}: the name of a recipe is wanted, or name(argument=value)")
        try:
            call = ast.parse(f"f({match[2] or ''})", mode="eval").body
        except SyntaxError:
            raise UsageError(f"{where}: {self.flag} {text}: the arguments cannot be read") from None
        return match[1], [one for _, one, _ in self._arguments(call, where)]

    def _arguments(self, call: ast.Call, where: str) -> Iterator[tuple[str, TheirSetting, str]]:
        for word in call.keywords:
            text = ast.unparse(word)
            key = self.table.arguments.get(word.arg or "", word.arg or "**")
            value = _literal(word.value)
            source = TheirSetting(key, value or [""], where, text)
            yield ("set", source, "") if value is not None else ("lost", source, RUN)

    def _of_python(self, path: str) -> Iterator[tuple[str, TheirSetting, str]]:
        """("recipe", its name), ("set", a field) or ("lost", a line that cannot be read, why), in order."""
        try:
            tree = ast.parse(read_text(path))
        except SyntaxError as error:
            raise UsageError(f"{path}:{error.lineno}: it is no Python that can be read: {error.msg}") from None
        imported = {
            name.asname or name.name: name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        held = set()  # names of variables with the recipe
        for node in (one for one in ast.walk(tree) if isinstance(one, (ast.Assign, ast.AugAssign))):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            where, text = f"{path}:{node.lineno}", ast.unparse(node)
            root, _, rest = ast.unparse(target).partition(".")
            if isinstance(node.value, ast.Call) and isinstance(target, ast.Name):
                name = self._recipe_called(node.value.func, imported)
                if name:
                    held.add(target.id)
                    yield "recipe", TheirSetting("recipe", [name], where, text), ""
                    yield from self._arguments(node.value, where)
                    continue
            if rest and root in held:
                value = _literal(node.value) if isinstance(node, ast.Assign) else None
                source = TheirSetting(rest, value or [""], where, text)
                yield ("set", source, "") if value is not None else ("lost", source, RUN)

    def _recipe_called(self, function: ast.expr, imported: Mapping[str, str]) -> str | None:
        """The recipe that a function makes: llm.llama3_8b.pretrain_recipe, or one of Bridge's by its own name."""
        parts = ast.unparse(function).split(".")
        parts[0] = imported.get(parts[0], parts[0])
        named = parts[-2] if parts[-1] == "pretrain_recipe" and len(parts) > 1 else parts[-1]
        if parts[-1] == "pretrain_recipe" or named.endswith("_config") and "pretrain" in named:
            return named
        return None


def _literal(node: ast.expr) -> list[str] | None:
    """The words of a number, text, list, None or torch.bfloat16; None for what would have to be run."""
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
        return [node.attr]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    if isinstance(value, (list, tuple)):
        return [str(one) for one in value]
    return [str(value).lower() if isinstance(value, bool) else str(value)]
