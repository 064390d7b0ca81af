# SPDX-License-Identifier: Apache-2.0
"""Read YAML files of PaddleFleetX: sections, `_base_`, and `-o Section.key=value`.

read("pretrain_gpt_345M.yaml") -> {"Model.hidden_size": TheirSetting("Model.hidden_size", ["1024"], ...), ...}
"""

from pathlib import Path

from megatron.errors import UsageError, no_such_file
from megatron.settings.dialects.table import TheirSetting
from megatron.settings.files import compose, merged, node_of, words_of
from megatron.settings.spelling import NO, YES

SECTIONS = """Global Engine Model Data Distributed Optimizer Profiler Fused FusedPasses Inference Offline_Eval Generation
    Compress Quantization Prune Distillation Tuning""".split()
BASE, INHERITED = "_base_", "_inherited_"
MAPPING = "{...}"  # the text of a section that -o replaces by a mapping
COMMAND = "-o "  # the place of an override: this and its key
Entries = dict[str, TheirSetting]  # a key without a value has None for its words; `where` ends in the key


def is_fleetx(root) -> bool:
    """Whether a YAML mapping (a node of PyYAML) has sections of PaddleFleetX, or is based on a file that has."""
    return any(key.value == BASE or key.value in SECTIONS and isinstance(node.value, list) for key, node in root.value)


def read(path: str, above: tuple[Path, ...] = ()) -> Entries:
    """Read the entries of a file and of its base files."""
    file, root, base = Path(path), compose(path), {}
    if file.resolve() in above:
        raise UsageError(f"{path}: builds on itself ({BASE})")
    lines = [(node, f"{path}:{key.start_mark.line + 1}: {BASE}") for key, node in _pairs(root) if key.value == BASE]
    for node, where in lines[:1]:
        if len(lines) > 1:
            raise UsageError(f"{lines[1][1]} is given twice (also in {where})")
        if isinstance(node.value, list):
            names = ", ".join(str(getattr(one, "value", one)) for one in node.value)
            raise UsageError(f"{where} names one file, and there are {len(node.value)}: {names}")
        below = file.parent / node.value
        if not below.is_file():
            itself = f"; did you mean {below.with_name(file.name)}?"
            raise UsageError(f"{where}: {below}: {no_such_file(below).replace(itself, '')}")
        base = read(str(below), (*above, file.resolve()))
    origin = lambda key: f"{path}:{key.start_mark.line + 1}: "
    alone = any(key.value == INHERITED and not _inherits(node, origin(key)) for key, node in _pairs(root))
    return over({} if alone else base, _flat(root, origin)) if root is not None else base


def _pairs(root) -> list[tuple]:
    return root.value if root is not None else []


def _inherits(node, where: str) -> bool:
    """The value of `_inherited_`: whether the entries of the base file are kept."""
    word = str(node.value).lower()
    if word not in YES + NO:
        raise UsageError(f"{where}{INHERITED}: '{node.value}' is neither true nor false")
    return word in YES


class Layers:
    """Files and overrides of a command line, each over those before it.

    entries: what counts; replaced: [(a value, the one of the same source that replaces it)]; notes: on empty overrides
    """

    def __init__(self):
        self.entries: Entries = {}
        self.replaced: list[tuple[TheirSetting, TheirSetting]] = []
        self.notes: list[str] = []
        self._said: dict[int, Entries] = {}  # turn -> the entries of its -o

    def read(self, path: str) -> Entries:
        """Put a file over the others. Returns its entries."""
        own = read(path)
        self._put(own, self.entries)
        return own

    def override(self, word: str, turn: int = 0) -> None:
        """Put `-o key=value` over all files. A mapping replaces the section, as in PaddleFleetX."""
        key, _, value = word.partition("=")
        below, own = self._said.get(turn, {}), _override(key, value)
        # `dropped` says it of those
        if not value.strip() and not any(one.startswith(f"{key}.") for one in self.entries):
            self.notes.append(f"-o {word} is empty: {key} is left out, as by {key}=null")
        self._put(own, below)
        self._said[turn] = over(below, own)

    def _put(self, own: Entries, below: Entries) -> None:
        self.entries = over(self.entries, own)
        self.replaced += replaced(below, own)


def _override(key: str, text: str) -> Entries:
    import yaml

    node = node_of(text)
    own = _flat(yaml.MappingNode("", [(yaml.ScalarNode("", key), node)]), lambda _: COMMAND)
    if node.id == "mapping":
        own = {key: TheirSetting(key, None, f"{COMMAND}{key}", MAPPING)} | own
    return over({}, own)


def over(below: Entries, own: Entries) -> Entries:
    """Merge entries over others. An empty key empties its section, and a section replaces a value."""
    gone = tuple(f"{key}." for key, one in own.items() if one.words is None)
    for section in gone:  # its text names the dropped keys
        names = ", ".join(
            key.removeprefix(section)
            for key, one in below.items()
            if key.startswith(section) and one.words and key not in own
        )
        if names:
            mapping = MAPPING if own[section[:-1]].text.startswith(MAPPING) else ""
            own = own | {section[:-1]: own[section[:-1]]._replace(text=mapping + names)}
    return {key: one for key, one in below.items() if key not in own and not key.startswith(gone)} | own


def in_words(pair: tuple[TheirSetting, TheirSetting]) -> tuple[str, str]:
    empty = lambda one: MAPPING if one.text.startswith(MAPPING) else "null"
    return tuple(f"{one.where}={' '.join(one.words or [empty(one)])}" for one in pair)


def dropped(entries: Entries) -> list[tuple[TheirSetting, str]]:
    """[(an empty or replaced section, a note of the keys below that it drops)]."""
    found = []
    for one in entries.values():
        if one.words is None and one.where and (names := one.text.removeprefix(MAPPING)):
            how = "is empty, and leaves out what its base says"
            how = "replaces the section, and leaves out what it says" if names != one.text else how
            found.append((one._replace(text=""), f"{how}: {names}"))
    return found


def replaced(below: Entries, own: Entries) -> list[tuple[TheirSetting, TheirSetting]]:
    """[(an overridden entry, the one that counts)] for values that the same source replaces."""
    pairs = []
    for key, one in below.items():
        emptied = (other for name, other in own.items() if other.words is None and key.startswith(f"{name}."))
        by = own.get(key) or next(emptied, one)
        if one.words not in (None, by.words):
            pairs.append((one, by))
    return pairs


def _flat(mapping, origin, prefix: str = "") -> Entries:
    entries: Entries = {}
    for key_node, node in merged(mapping):
        key = f"{prefix}{key_node.value}"
        if key in entries and not isinstance(node.value, list) and entries[key].words == words_of(node):
            continue  # given twice, with one value
        if first := next((one for name, one in entries.items() if f"{name}.".startswith(f"{key}.")), None):
            raise UsageError(f"{origin(key_node)}{key} is given twice (also in {first.where})")
        if key_node.value == INHERITED:
            section = prefix.rstrip(".")
            if not _inherits(node, f"{origin(key_node)}{prefix}") and section:
                entries[section] = TheirSetting(section, None, "", "")
        elif isinstance(node.value, list) and node.id == "mapping":
            entries |= _flat(node, origin, f"{key}.")
        elif key != BASE:
            words = words_of(node)
            entries[key] = TheirSetting(key, words, f"{origin(key_node)}{key}", " ".join(words or []))
    return entries
