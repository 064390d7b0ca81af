# SPDX-License-Identifier: Apache-2.0
"""Preprocess JSON lines into token files (`formats.py`) with several processes, in constant memory.

The parent finds the input, forks workers (`preprocess_worker.py`), monitors them and publishes the files. The files are
the same for any number of workers and any block size. A sample of the documents decides which tokenizer library is used."""

import contextlib
import gc
import multiprocessing
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from megatron.data.contamination import NgramIndex, Screen
from megatron.data.formats import FORMATS
from megatron.data.json_input import BadLine, Source, find_sources, parse_line, read_blocks, read_lines
from megatron.data.preprocess_encode import BlockEncoder, cache_memory
from megatron.data.preprocess_output import Reporter, Totals, Written, finish, output_prefixes, print_totals, replaced
from megatron.data.preprocess_worker import BLOCK, FRAME, Feed, Files, Ranges, Shared, TextBlock, Worker
from megatron.data.sentences import make_splitter
from megatron.data.workspace import Workspace, storage_error
from megatron.errors import DataError, Failure
from megatron.mpu.cpu_threads import cores
from megatron.tokenizer.base import ENDS_OF_TEXT, Tokenizer

SMALL_INPUT = 1 << 19  # bytes: the reference tokenizer is done before a faster one is loaded and checked


@dataclass
class Progress:
    """Sums over all workers so far. `total_input`: bytes on disk, 0 if unknown."""

    seconds: float
    documents: int
    text_bytes: int
    tokens: int
    input_bytes: int
    rejected: int
    total_input: int


def preprocess(
    settings,
    tokenizer: Tokenizer,
    log: Callable[[str], None] = lambda line: None,
    report: Callable[[Progress], None] = lambda progress: None,
    block_size: int = BLOCK,
    split: Callable[[str], list[str]] | None = None,
) -> Totals:
    """Preprocess the input of `settings`, a `preprocess_data.PreprocessOptions`.

    report: called several times per second; split: text -> sequences, overrides --split-sentences

    Raises DataError for input without documents (or a bad line with --on-bad-line stop), Locked, StorageError.
    """
    if settings.append_eod and tokenizer.eod is None:
        raise DataError("--append-eod: this vocabulary has no token for the end of a document", do="drop --append-eod")
    if settings.append_eod:
        log(end_of_document(tokenizer))
    started = time.perf_counter()
    sources = find_sources(settings.input, settings.document_separator, settings.json_keys, settings.lines_only)
    form = FORMATS[settings.output_format]
    if settings.split_sentences and split is None:
        split = make_splitter(settings.sentence_splitter, settings.lang, settings.keep_newlines, log)
    blocks = divide(sources, settings.workers, block_size)
    choose_engine(tokenizer, blocks, settings.json_keys, log)
    dtype = form.dtype(tokenizer.vocab_size)
    partitions = 1 if settings.keep_sequential_samples else settings.partitions
    workers = max(1, min(settings.workers or cores(), blocks.most_workers))
    encoder = BlockEncoder(
        tokenizer,
        settings.json_keys,
        dtype,
        settings.append_eod,
        split,
        partitions,
        form.keeps_empty,
        cache_memory(workers),
        origins=settings.origin,
        screen=screen_of(settings),
    )
    with Workspace(settings.output_prefix) as workspace:
        for prefix in output_prefixes(settings, form):
            if words := replaced(prefix, form):
                log(f"note: {words}")
        team = Team(settings, blocks, encoder, workspace, partitions, workers, form.head)
        log(f"Time to startup: {time.perf_counter() - started:.2f}")
        with team:
            team.work(report)
        if team.shared.totals[:, :, 0].any():
            log("Done! Now finalizing.")
        written = Written(
            team.shared, partitions, workspace, form, encoder.screen, sources if encoder.origins else None
        )
        return finish(settings, tokenizer, dtype, written, time.perf_counter() - started)


def end_of_document(tokenizer: Tokenizer) -> str:
    """The line that says which token ends documents, and which one might be meant instead.

    Tokenizers of chat models have the end of an answer as their `eos_token`.
    """
    names = {id: name for name, id in tokenizer.special_tokens.items()}
    name = names.get(tokenizer.eod, tokenizer.decode([tokenizer.eod]))
    others = [f"{one} ({tokenizer.pieces[one]})" for one in ENDS_OF_TEXT if one in tokenizer.pieces and one != name]
    instead = "; --append-eod takes the tokenizer's eos_token: docs/tokenizers.md says how to take "
    return f"end of document: {name} ({tokenizer.eod}){(instead + others[0]) if others else ''}"


def preprocess_and_report(settings, tokenizer: Tokenizer, start: float, split: Callable | None = None) -> None:
    """`preprocess` for a command: with progress lines, and totals at the end. start: of the command, `perf_counter`."""
    reporter = Reporter(settings.log_interval)
    try:
        totals = preprocess(settings, tokenizer, lambda line: print(line, flush=True), reporter, split=split)
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        sys.exit(130)
    reporter.end()
    print_totals(totals, time.perf_counter() - start)


def divide(sources: list[Source], workers: int | None, block_size: int = BLOCK) -> Ranges | Files | Feed:
    """Choose how workers share the input.

    Uncompressed files are read by ranges. Compressed ones and pipes have to be read in order: workers take whole files if
    there are enough of them, otherwise this process reads and feeds the workers.
    """
    whole = [source for source in sources if source.whole]
    if not whole:
        return Ranges(sources, block_size)
    too_few = len(whole) < (workers or cores())
    endless = any(source.size == 0 for source in whole)  # stdin and pipes
    return Feed(sources, block_size) if too_few or endless else Files(sources, block_size)


def screen_of(settings) -> Screen | None:
    """The search for evaluation sets (`--contamination`); None without it."""
    if not settings.contamination:
        return None
    return Screen(NgramIndex.open(settings.contamination), settings.on_contamination)


def choose_engine(tokenizer: Tokenizer, blocks: Ranges | Files | Feed, keys: list[str], log) -> None:
    """Use the fastest tokenizer library that agrees with the reference on a sample of the input.

    For small inputs, the reference is used.
    """
    size = sum(source.size for source in blocks.sources)
    if isinstance(blocks, Feed):
        places = blocks.peek()
    elif size < SMALL_INPUT:
        return
    else:
        places = read_places(blocks.sources)
    tokenizer.use_fastest(sample_texts(places, keys, sample_size(size)), log)


class Team:
    """The forked workers; the `with` block ends them."""

    def __init__(
        self,
        settings,
        blocks,
        encoder: BlockEncoder,
        workspace: Workspace,
        partitions: int,
        workers: int,
        head: int = 0,
    ):
        self.blocks, self.partitions, self.workspace = blocks, partitions, workspace
        self.context = multiprocessing.get_context("fork")
        keys, ngrams = len(settings.json_keys), len(encoder.screen.index.hashes) if encoder.screen else 0
        sizes = (blocks.lanes, keys * partitions, workers, keys, ngrams, len(encoder.special.names))
        self.shared = Shared(self.context, *sizes)
        self.total_input = sum(source.size for source in blocks.sources)
        self.workers = [
            Worker(i, blocks, encoder, self.shared, workspace, partitions, settings.on_bad_line == "stop", head)
            for i in range(workers)
        ]
        self.processes, self.messages = [], []

    def __enter__(self) -> "Team":
        gc.freeze()  # keeps the collector from touching, and so copying, shared pages
        for worker in self.workers:
            receive, send = multiprocessing.Pipe(duplex=False)
            process = self.context.Process(target=_run_worker, args=(worker, send), daemon=True)
            process.start()
            send.close()
            self.processes.append(process)
            self.messages.append(receive)
        if isinstance(self.blocks, Feed):
            os.close(self.blocks.receive)
            os.set_blocking(self.blocks.send, False)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        gc.unfreeze()

    def work(self, report: Callable[[Progress], None]) -> None:
        """Feed the workers if necessary, and wait for them. Raises the error of a failed worker."""
        self._started, self._report = time.perf_counter(), report
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                selector.register(process.sentinel, selectors.EVENT_READ, process)
            if isinstance(self.blocks, Feed):
                for block in self.blocks.read():
                    self._send(selector, _frame(block))
                    self._send(selector, block.data)
                os.close(self.blocks.send)
            while selector.get_map():
                self._watch(selector, 0.2)
        self._report(self.progress())

    def _send(self, selector, data: bytes) -> None:
        """Write to the pipe of the workers, and check on them while it is full."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.blocks.send, view) :]
            except BlockingIOError:
                selector.register(self.blocks.send, selectors.EVENT_WRITE)
                self._watch(selector, 0.2)
                selector.unregister(self.blocks.send)
            except BrokenPipeError:
                self._watch(selector, 5.0)

    def _watch(self, selector, timeout: float) -> None:
        """Wait for an event. Raises the error of a failed worker."""
        for key, _ in selector.select(timeout):
            if key.data is None:
                continue
            process = key.data
            process.join()
            selector.unregister(process.sentinel)
            if process.exitcode:
                raise self._failure(process)
        self._report(self.progress())

    def _failure(self, process) -> BaseException:
        """The error that a failed worker sent, or one that describes its exit code."""
        receive = self.messages[self.processes.index(process)]
        with contextlib.suppress(EOFError):
            if receive.poll(0):
                kind, arguments = receive.recv()
                error = kind(*arguments)
                return storage_error(error, self.workspace.prefix) if isinstance(error, OSError) else error
        if process.exitcode == -signal.SIGKILL:
            do = "if memory ran out, give fewer --workers"
            return Failure("a worker was killed (SIGKILL)", "nothing was written", do)
        return Failure(f"a worker ended with code {process.exitcode}", "nothing was written")

    def progress(self) -> Progress:
        sums = self.shared.progress.sum(axis=0).tolist()
        return Progress(time.perf_counter() - self._started, *sums[:5], self.total_input)


def _frame(block: TextBlock) -> bytes:
    return FRAME.pack(block.number, block.source, len(block.data), block.input_bytes, block.start)


def _run_worker(worker: Worker, send: Connection) -> None:
    """Body of a worker process. Only the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        worker.run()
    except Failure as error:
        send.send((type(error), (error.what, error.why, error.do)))
        os._exit(error.code)
    except OSError as error:
        send.send((OSError, (error.errno, error.strerror, error.filename)))
        os._exit(1)


PLACES = 8  # in the input to take documents from
REACH = 1 << 16  # bytes read at each place


def sample_size(input_bytes: int) -> int:
    """Characters to compare: 1/1000 of the input, between 32 Ki (8 ms of the reference) and 256 Ki (65 ms)."""
    return min(max(input_bytes // 1000, 1 << 15), 1 << 18)


def sample_texts(blocks: Iterable[bytes], keys: list[str], characters: int) -> list[str]:
    """Texts of documents from each block, about `characters` in total. Invalid lines are left out."""
    texts = []
    for block in blocks:
        room = characters // PLACES
        for line in block.split(b"\n"):
            if room <= 0:
                break
            for text in _texts(line, keys):
                texts.append(text[:room])
                room -= len(texts[-1])
    return texts


def _texts(line: bytes, keys: list[str]) -> Iterator[str]:
    try:
        values = parse_line(line, keys) or []
    except BadLine:
        return
    for value in values:
        yield from value if isinstance(value, list) else [value]


def read_places(sources: list[Source]) -> Iterator[bytes]:
    """Whole lines from PLACES spread over all files: anywhere in uncompressed files, at the start of others."""
    total = sum(source.size for source in sources)
    ends, end = [], 0
    for source in sources:
        ends.append(end := end + source.size)
    for place in range(PLACES):
        position = total * place // PLACES
        index = next(index for index, end in enumerate(ends) if position < end)
        source = sources[index]
        if source.whole:
            yield next(iter(read_blocks(source, REACH)), (b"", 0))[0]
        else:
            start = position - (ends[index] - source.size)
            with open(source.path, "rb", buffering=0) as file:
                yield read_lines(file, start, min(start + REACH, source.size))[1]
