# SPDX-License-Identifier: Apache-2.0
"""Segment Chinese text into words with optional libraries, each as a function `text -> words`.

jieba is small and fast; LAC (package `lac`, on PaddlePaddle) is slower and more accurate. They are loaded at the first
text, in the process that segments it: LAC's engine does not survive a fork.
"""

import functools
import importlib.util
from collections.abc import Callable

from megatron.errors import MissingPackage

Segment = Callable[[str], list[str]]
PACKAGES = {"jieba": ("jieba", "jieba"), "lac": ("LAC", "lac"), "seg": ("LAC", "lac")}  # name -> module, its package


def make_segmenter(name: str, needed_by: str = "") -> Segment:
    """The segmenter of `--cn-seg-func`: jieba; lac, LAC's lexical analysis; seg, only LAC's segmentation.

    needed_by: the flag for the message. Raises DataError if the package is not installed.
    """
    module, package = PACKAGES[name]
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module that was put into sys.modules without a spec
        spec = True
    if spec is None:
        who = needed_by or f"--cn-seg-func {name}"
        do = f"pip install {package}, or give text that is cut into words already: --cn-splited"
        raise MissingPackage(f"{who} needs the package {package}, which is not installed", do=do)
    load = functools.cache(dict(jieba=_jieba, lac=lambda: _lac("lac"), seg=lambda: _lac("seg"))[name])
    return lambda text: load()(text)


def _jieba() -> Segment:
    import jieba

    if hasattr(jieba, "setLogLevel"):
        jieba.setLogLevel("WARNING")  # otherwise each process logs the loading of the dictionary
    return lambda text: list(jieba.cut(text))


def _lac(mode: str) -> Segment:
    from LAC import LAC

    model = LAC(mode=mode)
    return (lambda text: model.run(text)[0]) if mode == "lac" else model.run


def split_words(text: str, mark: str) -> list[str]:
    """The words of a segmented text, separated by `mark`. Two consecutive empty pieces mean that the mark itself is a word.

    >>> split_words("a b  c", " ")
    ['a', 'b', '', 'c']
    >>> split_words("a   b", " ")
    ['a', '', ' ', 'b']
    >>> split_words("a     b", " ")
    ['a', '', ' ', '', ' ', 'b']
    """
    words, after_empty = text.split(mark), False
    for place, word in enumerate(words):
        if not word and after_empty:
            words[place], after_empty = mark, False
        else:
            after_empty = not word
    return words
