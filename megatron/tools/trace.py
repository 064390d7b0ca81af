# SPDX-License-Identifier: Apache-2.0
"""Which documents a step was trained on, when a document was or will be seen, which documents hold a text.

    python -m megatron.tools.trace --load checkpoints --iter 1200
    python -m megatron.tools.trace --load checkpoints --doc 4711
    python -m megatron.tools.trace --load checkpoints --text "the old man and the"
    python -m megatron.tools.trace --load checkpoints --sample 38400
    python -m megatron.tools.trace --iter 5 --data-path corpus_text_document --num-layers 12 ...    (a run to come)

--load is the folder of a run: its metrics.jsonl says which launches it had and which steps count; a checkpoint alone does,
too, for a run that never changed its batch. Without a run it takes the flags of pretrain_gpt.py, and --world-size.
Answers come from the index maps that training itself reads. Where a step's ledger was recorded, the tokens that the answer
names are hashed and compared with it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Optional

import numpy as np

from megatron.errors import DataError, Failure, SettingsError, UsageError, run_main
from megatron.settings.from_checkpoint import refuse_lost
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Config, Data, TokenizerSettings, setting

SPLITS = ("train", "valid", "test")
MOST_VERIFIED = 1000  # documents whose text is compared with what is looked for
WHOLE = 0.5  # share of a text's n-grams from which a document is told of


@dataclass(frozen=True)
class TraceOptions:
    """What is asked, and how it is answered."""

    iter: Optional[list[int]] = setting("steps: which documents were they trained on?", None, "--iteration")
    sample: Optional[list[int]] = setting("places in the order of training: which documents?", None)
    doc: Optional[list[str]] = setting("documents, N or PREFIX:N: which steps see them?", None, "--document")
    text: Optional[str] = setting("a text: which documents hold it, and which steps see them?", None)
    words: bool = setting("with --text: capitals, punctuation and white space do not count (decodes all tokens)", False)
    of: Literal["train", "valid", "test"] = setting("training, or the samples of evaluations", "train")
    first: int = setting("how many samples, steps or documents are told of each", 20)
    show: int = setting("characters of each document's text; 0: none", 80)
    sources: Optional[list[str]] = setting("folders with the source files, where they have moved", None)
    json: bool = setting("everything, as JSON lines", False)


@dataclass(frozen=True)
class RunFolder:
    """Where the run is."""

    load: Optional[str] = setting("folder of a run: checkpoints, or metrics.jsonl", None)


COMMON = (*TraceOptions.__dataclass_fields__, "load", "data_path", "vocab_file", "merge_file", "tokenizer_model")


def main(argv: list[str]) -> None:
    """Find the run, answer."""
    history, options, tokenizer = settle(argv)
    trace = DocumentTrace(history, options, tokenizer)
    for note in history.notes:
        print(f"note: {note}", file=sys.stderr)
    for iteration in options.iter or ():
        trace.tell_step(iteration)
    for place in options.sample or ():
        trace.tell_sample(place)
    for word in options.doc or ():
        trace.tell_document(*trace.document_named(word))
    if options.text is not None:
        trace.tell_text(options.text)
    sys.stdout.flush()


def settle(argv: list[str]):
    """(RunHistory, options, settings of the tokenizer) of a command line."""
    from megatron.training.launches import planned, read_run

    light = dict(trace=TraceOptions, run=RunFolder, data=Data, tokenizer=TokenizerSettings)
    prog, about = "python -m megatron.tools.trace", __doc__.splitlines()[0]
    of_training = any(word.split("=")[0].replace("_", "-") in ("--num-layers", "--config", "-c") for word in argv)
    if not of_training or set(argv) & {"-h", "--help", "--help-all"}:
        groups, asked = parse_with_record(argv, light, prog=prog, description=about, common=COMMON)
        options = check(groups["trace"])
        if not groups["run"].load:
            raise UsageError("which run?", do="--load FOLDER, or the flags of pretrain_gpt.py")
        history = read_run(groups["run"].load)
        refuse_lost(history.record, "data", set(asked))
        changed = {name: getattr(groups["data"], name) for name in asked if hasattr(groups["data"], name)}
        words = {name: getattr(groups["tokenizer"], name) for name in asked if hasattr(groups["tokenizer"], name)}
        launches = [with_data(launch, changed) for launch in history.launches]
        tokenizer = replace(history.launches[-1].config.tokenizer, **words)
        return replace(history, launches=launches), options, tokenizer
    from megatron.model.arguments import parse_with_options
    from megatron.settings.rules import record
    from megatron.training.rules import resolve

    config, options = parse_with_options(argv, TraceOptions, about)
    options = check(options)
    world = config.planner.world_size or 1
    if config.batch.train_epochs is not None:
        from megatron.data.epochs import in_samples
        from megatron.model.recipe import recipe_of

        config = in_samples(config, recipe_of(config).own_data)
    config = resolve(config, world)
    if config.given("load"):
        try:
            return read_run(config.checkpoint.load), options, config.tokenizer
        except DataError:
            print(f"note: {config.checkpoint.load} holds no run yet", file=sys.stderr)
    return planned(config, record(config, world).dp), options, config.tokenizer


def with_data(launch, changed: dict[str, Any]):
    """A launch whose token files are elsewhere now. What would change the order is refused."""
    allowed = {"data_path", "train_data_path", "valid_data_path", "test_data_path", "data_cache_path"}
    if set(changed) - allowed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(set(changed) - allowed))
        raise UsageError(f"{names}: the run itself says it", do="with --load, only paths of moved files can be given")
    config = launch.config
    return replace(launch, config=replace(config, data=replace(config.data, **changed)))


def check(options: TraceOptions) -> TraceOptions:
    """Raise UsageError for no question, SettingsError for numbers that cannot be."""
    if not any((options.iter, options.sample, options.doc, options.text is not None)):
        raise UsageError("what is asked?", do="--iter N, --sample K, --doc N or --text '...'")
    if options.text is not None and not options.text.strip():
        raise UsageError("--text is empty")
    if min([1, *(options.iter or ())]) < 1 or min([0, options.first, options.show, *(options.sample or ())]) < 0:
        raise SettingsError("--iter starts at 1, --sample, --first and --show at 0")
    return options


@dataclass
class DocumentTrace:
    """Answers questions about a run."""

    history: Any  # training.launches.RunHistory
    options: TraceOptions
    tokenizer_settings: TokenizerSettings
    built: dict[Any, Any] = field(default_factory=dict)  # datasets of launches
    origins: dict[str, Any] = field(default_factory=dict)  # data.origin.Origins of prefixes, or None
    sources: dict[tuple[str, int], Any] = field(default_factory=dict)  # lines that were read

    # -- answers -------------------------------------------------------------------------------------------------------

    def tell_step(self, iteration: int) -> None:
        """The documents of a step; of an evaluation behind it, with --of."""
        if self.options.of != "train":
            return self.tell_evaluation(iteration)
        launch = self.history.launch_of(iteration)
        step = self.history.step(launch, iteration)
        dataset = self.dataset(launch)
        head = dict(
            kind="step", iteration=iteration, first_sample=step.first, samples=step.size, mesh=dict(launch.mesh)
        )
        head.update(done=step.done, skipped=step.skipped, ledger=self.ledger(launch, step))
        self.say(head, self._words_of_step(head, launch))
        micro = launch.config.batch.micro_batch_size
        for place in self._some(range(step.first, step.first + step.size)):
            number = (place - step.first) // micro
            where = dict(micro_batch=number // launch.dp, data_rank=number % launch.dp)
            self._tell_parts(
                launch, dataset, place, where, f"micro-batch {where['micro_batch']}, data rank {where['data_rank']}"
            )

    def tell_evaluation(self, iteration: int) -> None:
        """The documents of the evaluation of a split behind a step."""
        passes = [one for one in self.history.passes(self.options.of) if one.iteration == iteration]
        if not passes:
            known = ", ".join(str(one.iteration) for one in self.history.passes(self.options.of)[:10])
            raise DataError(
                f"there is no evaluation on {self.options.of} data at iteration {iteration}", f"there are: {known}"
            )
        launch = self.history.launches[-1]
        for one in passes:
            head = dict(
                kind="evaluation", split=self.options.of, iteration=iteration, first_sample=one.first, samples=one.size
            )
            words = f"evaluation on {self.options.of} data behind iteration {iteration}"
            self.say(head, f"{words}: samples {one.first:,} to {one.first + one.size - 1:,} of its order")
            for place in self._some(range(one.first, one.first + one.size)):
                self._tell_parts(launch, self.dataset(launch), place, {}, "")

    def tell_sample(self, place: int) -> None:
        """The documents of a place in the order, and the steps that read it."""
        when = self.when(np.array([place]))
        readers = [one for one in self.launches if any(own is one for own, _, _ in when)]
        for launch in readers or self.launches[-1:]:
            steps = [step for own, step, _ in when if own is launch]
            told = "; ".join(map(self._words_of_when, steps)) or "no step reads it"
            iterations = [step.iteration for step in steps]
            self.say(dict(kind="sample", sample=place, iterations=iterations), f"sample {place:,}: {told}")
            self._tell_parts(launch, self.dataset(launch), place, {}, "")

    def tell_document(self, prefix: str, document: int, more: Optional[dict] = None) -> None:
        """When a document is seen."""
        from megatron.data.places import epoch_length, sequences_of_document

        tokens = self.files[prefix]
        sequences = sequences_of_document(tokens, document)
        length = int(tokens.sequence_lengths[sequences.start : sequences.stop].sum())
        seen = []
        for launch in self.launches:
            dataset = self.dataset(launch)
            places = self.places(launch, prefix, sequences)
            for _, step, place in self.when(places, [launch]):
                each = epoch_length(dataset, prefix)
                seen.append((step, place, place // each + 1 if each else 0))
        seen.sort(key=lambda row: (row[0].iteration, row[1]))
        source = self.origin(prefix, document)
        row = dict(kind="document", file=prefix, document=document, tokens=length, **(more or {}))
        row.update(
            source=source,
            text=json.loads(self._snippet(prefix, document) or '""'),
            times_done=sum(step.done and not _skipped(step) for step, _, _ in seen),
        )
        row["seen"] = [
            dict(iteration=step.iteration, sample=place, epoch=epoch, done=step.done, skipped=_skipped(step))
            for step, place, epoch in seen
        ]
        head = f"{prefix}, document {document:,} ({length:,} tokens){self._words_of_source(source)}"
        if more:
            head += f"\n  {more['share']:.0%} of the text's n-grams" + ("; it holds the text" if more["exact"] else "")
        self.say(row, head + self._snippet(prefix, document))
        if self.options.json:
            return
        for step, place, epoch in seen[: self.options.first]:
            passes = f", pass {epoch} over its file" if epoch else ""  # epochs of sentences are shuffled together
            print(f"  {self._words_of_when(step)}, sample {place:,}{passes}")
        if len(seen) > self.options.first:
            print(f"  ... {len(seen) - self.options.first:,} more (--first N, --json)")
        if not seen:
            print(f"  no {'step' if self.options.of == 'train' else 'evaluation'} of this run reads it")

    def tell_text(self, text: str) -> None:
        """The documents that hold a text, and when they are seen."""
        from megatron.data.text_search import search, search_words, variants_of

        if self.tokenizer is None:
            raise SettingsError(
                "--text needs the run's tokenizer", do="--vocab-file and --merge-file, or --tokenizer-model"
            )
        variants = [] if self.options.words else variants_of(text, self.tokenizer.encode)
        found, parts = [], []
        for prefix, tokens in self.files.items():
            if self.options.words:
                decoded = ((number, self.decoded(prefix, number)) for number in range(tokens.num_documents))
                holders = search_words(decoded, text)
            else:
                holders = search(tokens, variants)
            for number, holder in enumerate(holders):
                exact = number < MOST_VERIFIED and text in self.decoded(prefix, holder.document)
                exact = holder.share == 1 if self.options.words else exact
                if exact:
                    found.append((prefix, holder, True))
                elif holder.share >= WHOLE:
                    parts.append((prefix, holder, False))
        told = sorted(found + parts, key=lambda row: (not row[2], -row[1].share))
        head = dict(kind="text", text=text, documents=len(found), partly=len(parts))
        self.say(head, f"{len(found):,} documents hold the text, {len(parts):,} at least half of its n-grams")
        for prefix, holder, exact in told if self.options.json else told[: self.options.first]:
            self.tell_document(prefix, holder.document, dict(share=round(holder.share, 4), exact=exact))

    # -- the run -------------------------------------------------------------------------------------------------------

    @property
    def launches(self) -> list:
        """The launches whose data is asked about: evaluations are told of as the last one has them."""
        return self.history.launches if self.options.of == "train" else self.history.launches[-1:]

    def dataset(self, launch):
        """The samples of a launch, of the split that is asked about."""
        from megatron.training.datasets import dataset_sizes

        config: Config = launch.config
        sizes = dataset_sizes(config.batch, launch.dp, config.data.full_validation)
        key = repr((config.data, config.model.seq_length, config.logging.seed, sizes, config.extra))
        if key not in self.built:
            self._refuse_own_data(config)
            which = SPLITS.index(self.options.of)
            size = sizes[which] if self.options.of == "train" else max(sizes[which], self._evaluated())
            sizes = tuple(size if number == which else 0 for number in range(3))
            made = self._splits(config, sizes)[which]
            if made is None:
                raise DataError(f"this run has no {self.options.of} data", do="see --split and --eval-iters of the run")
            self.built[key] = made
        return self.built[key]

    def _splits(self, config: Config, sizes: tuple[int, ...]) -> tuple:
        """(train, valid, test): rows of tokens, or the arrays that the recipe of a masked model makes of sentences."""
        from megatron.data.gpt_dataset import build_datasets
        from megatron.model.recipe import recipe_of

        recipe, log = recipe_of(config), lambda line: print(line, file=sys.stderr, flush=True)
        if recipe.arrays is not None:
            return recipe.build_datasets(config, *self._vocabulary(config), sizes, log)
        length, seed = config.model.seq_length, config.logging.seed
        return build_datasets(config.data, length, sizes, seed, eod=self._eod(config), log=log)

    def _vocabulary(self, config: Config) -> tuple[Any, int]:
        """(tokenizer, size of the vocabulary) of a run: its special tokens are in samples of masked models."""
        from megatron.training.datasets import build_vocabulary

        return build_vocabulary(replace(config, tokenizer=self.tokenizer_settings), lambda line: None)

    def places(self, launch, prefix: str, sequences: range) -> np.ndarray:
        """Places of the order of training (or of a split) that hold some sequences of a token file."""
        from megatron.data.loader import cyclic_order
        from megatron.data.places import find_places

        dataset = self.dataset(launch)
        found = find_places(dataset, prefix, sequences)
        if launch.config.data.dataloader_type != "cyclic" or not len(found):
            return found
        ends = launch.bounds()[[0, -1]] if self.options.of == "train" else [0, self._evaluated()]
        wanted, size, places = np.zeros(len(dataset), bool), len(dataset), []
        wanted[found] = True
        for epoch in range(int(ends[0]) // size, -(-int(ends[1]) // size)):
            places.append(np.flatnonzero(wanted[cyclic_order(epoch, size)]) + epoch * size)
        return np.concatenate(places) if places else found[:0]

    def index(self, launch, dataset, place: int) -> int:
        """The dataset's sample at a place."""
        from megatron.data.loader import cyclic_order
        from megatron.data.sampler import cyclic_position

        if launch.config.data.dataloader_type != "cyclic":
            if place >= len(dataset):
                raise DataError(f"sample {place:,} is past the end: there are {len(dataset):,}")
            return place
        epoch, index = cyclic_position(place, len(dataset))
        return int(cyclic_order(epoch, len(dataset))[index])

    def when(self, places: np.ndarray, launches=None) -> list[tuple[Any, Any, int]]:
        """(launch, step or evaluation, place) of all that read some places."""
        if self.options.of == "train":
            return [
                (launch, step, place)
                for launch in launches or self.launches
                for step, place in self.history.steps_with(launch, places)
            ]
        launch = self.history.launches[-1]
        return [
            (launch, one, int(place))
            for one in self.history.passes(self.options.of)
            for place in places
            if one.first <= place < one.first + one.size
        ]

    def ledger(self, launch, step) -> str:
        """Whether the hash of a step's tokens is the one that training wrote: "agrees", "differs", or "" without one."""
        if not (step.ledger and step.done):
            return ""
        from megatron.data.ledger import sum_hashes, to_hex
        from megatron.data.loader import MicroBatchLoader
        from megatron.model.recipe import recipe_of

        config, recipe = launch.config, recipe_of(launch.config)
        named = {}
        if recipe.arrays is not None:
            named = dict(arrays=recipe.arrays(config, self._vocabulary(config)[1]), collate=recipe.collate)
        batch, eod = replace(config.data, num_workers=0), self._eod(config)
        with MicroBatchLoader(self.dataset(launch), batch, micro_batch_size=1, eod=eod, **named) as loader:
            hashes = [loader.sample_hash(place) for place in range(step.first, step.first + step.size)]
        return "agrees" if to_hex(sum_hashes(hashes)) == step.ledger else "differs"

    def _refuse_own_data(self, config: Config) -> None:
        from megatron.model.recipe import recipe_of

        if config.data.mock_data:
            raise DataError("this run was trained on synthetic samples (--mock-data): there are no documents")
        if recipe_of(config).own_data:
            raise DataError(f"{config.model.model_type} makes its samples itself: where they come from is not known")
        if any(getattr(group, "task_mixture", None) for group in config.extra.values()):
            raise DataError("this run mixes tasks (--task-mixture): which texts its samples come from is not told")

    def _eod(self, config: Config) -> Optional[int]:
        """The token that ends documents, as preprocessing noted it, or the tokenizer has it."""
        from megatron.data.blend import parse_blend
        from megatron.data.vocabulary import identity_of

        words = config.data.data_path or config.data.train_data_path or config.data.valid_data_path
        for prefix in parse_blend(words, "--data-path").prefixes if words else ():
            if (made := identity_of(prefix)) and made.get("eod") is not None:
                return made["eod"]
        return None if self.tokenizer is None else self.tokenizer.eod

    def _evaluated(self) -> int:
        return max((one.first + one.size for one in self.history.passes(self.options.of)), default=0)

    # -- documents -----------------------------------------------------------------------------------------------------

    @cached_property
    def files(self) -> dict[str, Any]:
        """The token files of all launches: prefix -> files."""
        from megatron.data.places import files_of

        return {key: files for launch in self.launches for key, files in files_of(self.dataset(launch)).items()}

    @cached_property
    def tokenizer(self):
        """The run's tokenizer, None where it has none or its files are not there."""
        from megatron.tokenizer import build_tokenizer

        try:
            return build_tokenizer(self.tokenizer_settings, lambda line: None)
        except (Failure, OSError) as error:
            print(f"note: no tokenizer, so no text of tokens: {str(error).splitlines()[0]}", file=sys.stderr)
            return None

    def document_named(self, word: str) -> tuple[str, int]:
        """(prefix, document) of N or PREFIX:N. Raises UsageError for one that is not clear."""
        name, colon, number = word.rpartition(":")
        if not number.isdecimal():
            raise UsageError(f"--doc {word}: N or PREFIX:N is wanted")
        matches = [key for key in self.files if not colon or key == name or key.endswith("/" + name)]
        if len(matches) != 1:
            raise UsageError(
                f"--doc {word}: of which token file?", f"there are {', '.join(self.files)}", "--doc PREFIX:N"
            )
        return matches[0], int(number)

    def origin(self, prefix: str, document: int) -> Optional[dict]:
        """Source file, byte and hash of a document; None where it is not known."""
        from megatron.data.origin import open_origins

        if prefix not in self.origins:
            self.origins[prefix] = open_origins(prefix, self.files[prefix].num_documents)
        found = self.origins[prefix]
        return None if found is None else found[document]._asdict()

    def decoded(self, prefix: str, document: int, most: Optional[int] = None) -> str:
        """The text of a document's tokens."""
        tokens = self.files[prefix]
        first, last = tokens.document_indices[document : document + 2].tolist()
        ids = [id for sequence in range(first, last) for id in tokens.get(sequence).tolist()]
        return self.tokenizer.decode(ids[:most])

    def _snippet(self, prefix: str, document: int, part=None) -> str:
        """The beginning of a document, or of a part of it, on a line of its own."""
        if not self.options.show:
            return ""
        if part is not None and self.tokenizer is not None:
            ids = self.files[prefix].get(part.document, part.offset, min(part.length, self.options.show))
            text = self.tokenizer.decode(ids.tolist())
        elif self.tokenizer is not None:
            text = self.decoded(prefix, document, self.options.show)
        else:
            text = self.source_text(prefix, document) or ""
        if not text:
            return ""
        short = " ".join(text[: 2 * self.options.show].split())[: self.options.show]
        return f"\n  {json.dumps(short, ensure_ascii=False)}"

    def source_text(self, prefix: str, document: int) -> Optional[str]:
        """The text of a document in its source; None where that is gone, has changed, or only a part of it was taken."""
        from megatron.data.json_input import BadLine, parse_line
        from megatron.data.origin import find_file, lines_at, text_hash

        origin = self.origin(prefix, document)
        path = origin and find_file(origin["file"], self.options.sources or ())
        if not path or origin["piece"]:
            return None
        try:
            line = lines_at(path, [origin["offset"]], origin["separator"])[origin["offset"]]
            record = json.loads(line)
            for key in record if isinstance(record, dict) else ():
                value = parse_line(line, [key])[0] if isinstance(record[key], (str, list)) else ""
                if f"{text_hash(value):016x}" == origin["hash"]:
                    return value if isinstance(value, str) else "\n".join(value)
        except (BadLine, ValueError, OSError, DataError):
            return None
        return None

    # -- words ---------------------------------------------------------------------------------------------------------

    def say(self, row: dict, words: str) -> None:
        print(json.dumps(row, ensure_ascii=False) if self.options.json else words)

    def _some(self, places: range) -> Sequence[int]:
        if self.options.json:
            return places
        if len(places) > self.options.first:
            print(f"  the first {self.options.first:,} of {len(places):,} samples (--first N, --json):")
        return places[: self.options.first]

    def _tell_parts(self, launch, dataset, place: int, where: dict, words: str) -> None:
        from megatron.data.places import document_of

        origin = dataset.origin(self.index(launch, dataset, place))
        tokens = self.files[origin.prefix]
        parts: dict[int, list[int]] = {}
        for part in origin.parts:
            parts.setdefault(document_of(tokens, part.document), []).append(part)
        documents = [
            dict(
                document=document, tokens=sum(part.length for part in own), source=self.origin(origin.prefix, document)
            )
            for document, own in parts.items()
        ]
        row = dict(kind="sample", sample=place, **where, file=origin.prefix, number=origin.number, documents=documents)
        row["parts"] = [list(part) for part in origin.parts]
        self.say(row, f"  sample {place:,}{words and f' ({words})'}: {origin.prefix}")
        if self.options.json:
            return
        for one in documents:
            head = f"    document {one['document']:,}: {one['tokens']:,} tokens{self._words_of_source(one['source'])}"
            print(
                head + self._snippet(origin.prefix, one["document"], parts[one["document"]][0]).replace("\n", "\n    ")
            )

    def _words_of_step(self, head: dict, launch) -> str:
        last = head["first_sample"] + head["samples"] - 1
        words = f"iteration {head['iteration']:,}: samples {head['first_sample']:,} to {last:,}"
        words += f", {launch.config.batch.micro_batch_size} at a time on {launch.dp} data ranks"
        if head["skipped"]:
            words += "; it was left out: nothing was trained on them"
        elif not head["done"]:
            words += "; it is to come"
        told = dict(
            agrees="the ledger agrees: these are its very tokens", differs="THE LEDGER DIFFERS: its tokens were others"
        )
        return words + (f"; {told[head['ledger']]}" if head["ledger"] else "")

    def _words_of_when(self, step) -> str:
        words = f"{'iteration' if self.options.of == 'train' else 'evaluation at iteration'} {step.iteration:,}"
        if _skipped(step):
            return f"{words} (left out)"
        return words if step.done else f"{words} (to come)"

    @staticmethod
    def _words_of_source(source: Optional[dict]) -> str:
        if not source:
            return ""
        piece = f", piece {source['piece']} of what was left of it" if source["piece"] else ""
        return f", from {source['file']} at byte {source['offset']:,}{piece}"


def _skipped(step) -> bool:
    return bool(getattr(step, "skipped", False))


if __name__ == "__main__":
    run_main(main)
