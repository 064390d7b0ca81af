# SPDX-License-Identifier: Apache-2.0
"""Sample documents from the input, to compare a fast tokenizer with the reference before it is used."""

from collections.abc import Iterable, Iterator

from megatron.data.json_input import BadLine, Source, parse_line, read_blocks, read_range

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
                yield read_range(file, start, min(start + REACH, source.size))
