# SPDX-License-Identifier: Apache-2.0
"""Trace training data: the documents of a step, the steps that see a document, the documents that hold a text.

    python -m megatron.tools.trace --load checkpoints --iter 1200
    python -m megatron.tools.trace --load checkpoints --doc 4711
    python -m megatron.tools.trace --load checkpoints --text "the old man and the"
    python -m megatron.tools.trace --load checkpoints --sample 38400
    python -m megatron.tools.trace --iter 5 --data-path corpus_text_document --num-layers 12 ...    (a future run)

--load is the folder of a run: its metrics.jsonl lists its launches and the steps that count; a checkpoint alone is enough
for a run that never changed its batch. Without a run it takes the flags of pretrain_gpt.py, and --world-size.
Answers come from the index maps that training itself reads. If a step's ledger was recorded, the tokens of the answer
are hashed and compared with it.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Optional

import numpy as np

from megatron.data.launches import planned, read_run
from megatron.errors import DataError, SettingsError, UsageError, run_main
from megatron.settings.declare import dashed
from megatron.settings.from_checkpoint import refuse_lost
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Data, TokenizerSettings, setting
from megatron.training.document_trace import DocumentTrace

MOST_VERIFIED = 1000  # documents whose decoded text is searched
WHOLE = 0.5  # smallest share of a text's n-grams for which a document is listed


@dataclass(frozen=True)
class TraceOptions:
    """The questions, and how they are answered."""

    iter: Optional[list[int]] = setting("steps: which documents were they trained on?", None, "--iteration")
    sample: Optional[list[int]] = setting("places in the order of training: which documents?", None)
    doc: Optional[list[str]] = setting("documents, N or PREFIX:N: which steps see them?", None, "--document")
    text: Optional[str] = setting("a text: which documents hold it, and which steps see them?", None)
    words: bool = setting("with --text: capitals, punctuation and white space do not count (decodes all tokens)", False)
    of: Literal["train", "valid", "test"] = setting("training, or the samples of evaluations", "train")
    first: int = setting("samples, steps or documents that are shown of each", 20)
    show: int = setting("characters of each document's text; 0: none", 80)
    sources: Optional[list[str]] = setting("folders with the source files, where they have moved", None)
    json: bool = setting("everything, as JSON lines", False)


@dataclass(frozen=True)
class RunFolder:
    """The folder of the run."""

    load: Optional[str] = setting("folder of a run: checkpoints, or metrics.jsonl", None)


COMMON = (*TraceOptions.__dataclass_fields__, "load", "data_path", "vocab_file", "merge_file", "tokenizer_model")


def main(argv: list[str]) -> None:
    """Read the run and print the answers."""
    history, options, tokenizer = read_command(argv)
    trace = DocumentTrace(history, options.of, tokenizer, _note, options.sources or ())
    answers = Answers(trace, options)
    for note in history.notes:
        _note(f"note: {note}")
    for iteration in options.iter or ():
        answers.show_step(iteration)
    for place in options.sample or ():
        answers.show_sample(place)
    for word in options.doc or ():
        answers.show_document(*answers.document_named(word))
    if options.text is not None:
        answers.show_text(options.text)
    sys.stdout.flush()


def read_command(argv: list[str]):
    """Read a command line into (RunHistory, options, settings of the tokenizer)."""
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
    from megatron.model.command_line import parse_with_options
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
            _note(f"note: {config.checkpoint.load} holds no run yet")
    return planned(config, record(config, world).dp), options, config.tokenizer


def with_data(launch, changed: dict[str, Any]):
    """Replace the paths of a launch whose token files have moved. Settings that would change the order are refused."""
    paths = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_cache_path")
    allowed = {*paths, "object_storage_cache_path", "mmap_bin_files"}
    if set(changed) - allowed:
        names = ", ".join(dashed(name) for name in sorted(set(changed) - allowed))
        raise UsageError(f"{names}: set by the run itself", do="with --load, only paths of moved files can be given")
    config = launch.config
    return replace(launch, config=replace(config, data=replace(config.data, **changed)))


def check(options: TraceOptions) -> TraceOptions:
    """Raise UsageError without a question, SettingsError for numbers out of range."""
    if not any((options.iter, options.sample, options.doc, options.text is not None)):
        raise UsageError("what is asked?", do="--iter N, --sample K, --doc N or --text '...'")
    if options.words and options.text is None:
        raise UsageError("--words needs --text: it says how a text is looked for")
    if options.text is not None and not options.text.strip():
        raise UsageError("--text is empty")
    if min([1, *(options.iter or ())]) < 1 or min([0, options.first, options.show, *(options.sample or ())]) < 0:
        raise SettingsError("--iter starts at 1, --sample, --first and --show at 0")
    return options


@dataclass
class Answers:
    """Prints the answers, as sentences or as JSON lines."""

    trace: DocumentTrace
    options: TraceOptions

    def show_step(self, iteration: int) -> None:
        """Print the documents of a step; with --of, of the evaluation after it."""
        if self.options.of != "train":
            return self.show_evaluation(iteration)
        launch = self.trace.history.launch_of(iteration)
        step = self.trace.history.step(launch, iteration)
        dataset = self.trace.dataset(launch)
        head = dict(
            kind="step", iteration=iteration, first_sample=step.first, samples=step.size, mesh=dict(launch.mesh)
        )
        head.update(done=step.done, skipped=step.skipped, ledger=self.trace.ledger(launch, step))
        self.say(head, self._words_of_step(head, launch))
        micro = launch.config.batch.micro_batch_size
        for place in self._some(range(step.first, step.first + step.size)):
            number = (place - step.first) // micro
            where = dict(micro_batch=number // launch.dp, data_rank=number % launch.dp)
            self._show_parts(
                launch, dataset, place, where, f"micro-batch {where['micro_batch']}, data rank {where['data_rank']}"
            )

    def show_evaluation(self, iteration: int) -> None:
        """Print the documents of the evaluation of a split after a step."""
        passes = [one for one in self.trace.history.passes(self.options.of) if one.iteration == iteration]
        if not passes:
            known = ", ".join(str(one.iteration) for one in self.trace.history.passes(self.options.of)[:10])
            raise DataError(
                f"there is no evaluation on {self.options.of} data at iteration {iteration}", f"there are: {known}"
            )
        launch = self.trace.history.launches[-1]
        for one in passes:
            head = dict(
                kind="evaluation", split=self.options.of, iteration=iteration, first_sample=one.first, samples=one.size
            )
            words = f"evaluation on {self.options.of} data after iteration {iteration}"
            self.say(head, f"{words}: samples {one.first:,} to {one.first + one.size - 1:,} of its order")
            for place in self._some(range(one.first, one.first + one.size)):
                self._show_parts(launch, self.trace.dataset(launch), place, {}, "")

    def show_sample(self, place: int) -> None:
        """Print the documents of a place in the order, and the steps that read it."""
        when = self.trace.when(np.array([place]))
        readers = [one for one in self.trace.launches if any(own is one for own, _, _ in when)]
        for launch in readers or self.trace.launches[-1:]:
            steps = [step for own, step, _ in when if own is launch]
            read_by = "; ".join(map(self._words_of_when, steps)) or "no step reads it"
            iterations = [step.iteration for step in steps]
            self.say(dict(kind="sample", sample=place, iterations=iterations), f"sample {place:,}: {read_by}")
            self._show_parts(launch, self.trace.dataset(launch), place, {}, "")

    def show_document(self, prefix: str, document: int, more: Optional[dict] = None) -> None:
        """Print a document and the steps that see it."""
        from megatron.data.find_documents import epoch_length, sequences_of_document

        tokens = self.trace.files[prefix]
        sequences = sequences_of_document(tokens, document)
        length = int(tokens.sequence_lengths[sequences.start : sequences.stop].sum())
        seen = []
        for launch in self.trace.launches:
            dataset = self.trace.dataset(launch)
            places = self.trace.places(launch, prefix, sequences)
            for _, step, place in self.trace.when(places, [launch]):
                each = epoch_length(dataset, prefix)
                seen.append((step, place, place // each + 1 if each else 0))
        seen.sort(key=lambda row: (row[0].iteration, row[1]))
        source = self.trace.origin(prefix, document)
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

    def show_text(self, text: str) -> None:
        """Print the documents that hold a text, and the steps that see them."""
        from megatron.data.find_documents import search, search_words, variants_of

        if self.trace.tokenizer is None:
            raise SettingsError(
                "--text needs the run's tokenizer", do="--vocab-file and --merge-file, or --tokenizer-model"
            )
        variants = [] if self.options.words else variants_of(text, self.trace.tokenizer.encode)
        whole, parts = [], []
        for prefix, tokens in self.trace.files.items():
            if self.options.words:
                decoded = ((number, self.trace.decoded(prefix, number)) for number in range(tokens.num_documents))
                holders = search_words(decoded, text)
            else:
                holders = search(tokens, variants)
            for number, holder in enumerate(holders):
                exact = number < MOST_VERIFIED and text in self.trace.decoded(prefix, holder.document)
                exact = holder.share == 1 if self.options.words else exact
                if exact:
                    whole.append((prefix, holder, True))
                elif holder.share >= WHOLE:
                    parts.append((prefix, holder, False))
        rows = sorted(whole + parts, key=lambda row: (not row[2], -row[1].share))
        head = dict(kind="text", text=text, documents=len(whole), partly=len(parts))
        self.say(head, f"{len(whole):,} documents hold the text, {len(parts):,} at least half of its n-grams")
        for prefix, holder, exact in rows if self.options.json else rows[: self.options.first]:
            self.show_document(prefix, holder.document, dict(share=round(holder.share, 4), exact=exact))

    def document_named(self, word: str) -> tuple[str, int]:
        """(prefix, document) of N or PREFIX:N. Raises UsageError if it is ambiguous or unknown."""
        name, colon, number = word.rpartition(":")
        if not number.isdecimal():
            raise UsageError(f"--doc {word}: N or PREFIX:N is wanted")
        matches = [key for key in self.trace.files if not colon or key == name or key.endswith("/" + name)]
        if len(matches) != 1:
            raise UsageError(
                f"--doc {word}: of which token file?", f"there are {', '.join(self.trace.files)}", "--doc PREFIX:N"
            )
        return matches[0], int(number)

    # -- words ---------------------------------------------------------------------------------------------------------

    def say(self, row: dict, words: str) -> None:
        print(json.dumps(row, ensure_ascii=False) if self.options.json else words)

    def _some(self, places: range) -> Sequence[int]:
        if self.options.json:
            return places
        if len(places) > self.options.first:
            print(f"  the first {self.options.first:,} of {len(places):,} samples (--first N, --json):")
        return places[: self.options.first]

    def _snippet(self, prefix: str, document: int, part=None) -> str:
        """The beginning of a document, or of a part of it, on its own line."""
        if not self.options.show:
            return ""
        if part is not None and self.trace.tokenizer is not None:
            ids = self.trace.files[prefix].get(part.document, part.offset, min(part.length, self.options.show))
            text = self.trace.tokenizer.decode(ids.tolist())
        elif self.trace.tokenizer is not None:
            text = self.trace.decoded(prefix, document, self.options.show)
        else:
            text = self.trace.source_text(prefix, document) or ""
        if not text:
            return ""
        short = " ".join(text[: 2 * self.options.show].split())[: self.options.show]
        return f"\n  {json.dumps(short, ensure_ascii=False)}"

    def _show_parts(self, launch, dataset, place: int, where: dict, words: str) -> None:
        from megatron.data.find_documents import document_of

        origin = dataset.origin(self.trace.index(launch, dataset, place))
        tokens = self.trace.files[origin.prefix]
        parts: dict[int, list[int]] = {}
        for part in origin.parts:
            parts.setdefault(document_of(tokens, part.document), []).append(part)
        documents = [
            dict(
                document=number,
                tokens=sum(part.length for part in own),
                source=self.trace.origin(origin.prefix, number),
            )
            for number, own in parts.items()
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
            words += "; it was skipped: they were not trained on"
        elif not head["done"]:
            words += "; it is upcoming"
        verdicts = dict(
            agrees="the ledger agrees: these are its very tokens", differs="THE LEDGER DIFFERS: its tokens were others"
        )
        return words + (f"; {verdicts[head['ledger']]}" if head["ledger"] else "")

    def _words_of_when(self, step) -> str:
        words = f"{'iteration' if self.options.of == 'train' else 'evaluation at iteration'} {step.iteration:,}"
        if _skipped(step):
            return f"{words} (skipped)"
        return words if step.done else f"{words} (upcoming)"

    @staticmethod
    def _words_of_source(source: Optional[dict]) -> str:
        from megatron.data.file_formats import LINES, TEXT, claimed

        if not source:
            return ""
        piece = f", piece {source['piece']} of what was left of it" if source["piece"] else ""
        formats = claimed(source["file"])
        stream = " of the JSON lines it is converted to" if TEXT in formats else " of its unpacked lines"
        where = f"{source['offset']:,}{stream if formats not in ((), (LINES,)) else ''}"
        return f", from {source['file']} at byte {where}{piece}"


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _skipped(step) -> bool:
    return bool(getattr(step, "skipped", False))


if __name__ == "__main__":
    run_main(main)
