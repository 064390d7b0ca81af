# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron` lists the commands; `python -m megatron NAME ...` is `python -m megatron.tools.NAME ...`."""

import ast
import runpy
import sys
from pathlib import Path

from megatron.errors import UsageError, did_you_mean, run_main

TOOLS = Path(__file__).parent
SCRIPTS = {  # entry scripts at the root of a checkout
    "pretrain_gpt.py": "Train GPT, Llama, Qwen, Mixtral and other decoders.",
    "pretrain_hybrid.py": "Train a model whose layers a pattern lists.",
    "pretrain_t5.py, pretrain_bert.py": "Train an encoder-decoder, or a masked encoder.",
    "finetune.py": "Fine-tune on tasks, conversations or preferences; LoRA.",
    "preprocess_data.py": "Tokenize text into token files.",
    "merge_datasets.py": "Join token files.",
}
OPENWEBTEXT = """blacklist_urls cleanup_dataset cleanup_fix_dataset download filter_ngrams find_duplicates
    group_duplicate_url remove_group_duplicates"""
OTHERS = {  # commands of other suites with their names and flags -> whose
    "checkpoint_util": "Megatron-LM",
    "create_pretraining_data": "PaddleNLP",
    "pretrain": "llmacc, python -m megatron.pretrain",
    "raw_trans_to_json": "PaddleNLP",
    "shuf": "GNU coreutils",
    "tasks": "Megatron-LM, python -m megatron.tasks.main",
    "text_generation_cli": "Megatron-LM",
    **{f"openwebtext.{name}": "Megatron-LM" for name in OPENWEBTEXT.split()},
}
MEANT = {  # words that are no commands -> what is meant
    "chat": "conversations: generate --chat in a terminal, serve on a page",
    "convert": "checkpoint from-hf, to-hf, from-megatron, to-megatron",
    "finetune": "it is a script: finetune.py, or python -m finetune",
    "train": "they are scripts: pretrain_gpt.py, or python -m pretrain_gpt",
    "quantize": "checkpoint quantize",
}
HIDDEN = ("__init__", "__main__", "flag_docs", "script_heads")  # for developers


def commands() -> dict[str, str]:
    """Name -> first sentence of the documentation of each command. Reads the files, and imports none."""
    found = {}
    for path in sorted([*TOOLS.glob("*.py"), *TOOLS.glob("*/*.py")]):
        if path.stem not in HIDDEN:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            name = ".".join(path.relative_to(TOOLS).with_suffix("").parts)
            found[name] = " ".join(text.split("\n\n")[0].split())
    return found


def listing() -> str:
    """The list of commands."""
    known = commands()
    own = {name: text for name, text in known.items() if name not in OTHERS}
    others = {name: f"({whose}) {known[name]}" for name, whose in OTHERS.items()}
    return "\n".join(
        [
            "Training, with the scripts of the checkout, elsewhere python -m pretrain_gpt (each has --help):",
            *_rows(SCRIPTS),
            "",
            "Commands: python -m megatron.tools.NAME (each has --help)",
            *_rows(own),
            "",
            "Commands of other suites, with their names and flags: python -m megatron.tools.NAME",
            *_rows(others),
        ]
    )


def _rows(texts: dict[str, str]) -> list[str]:
    width = max(map(len, texts)) + 2
    most = min(100, 120 - width)
    cut = lambda text: text if len(text) <= most else f"{text[: most - 3].rsplit(' ', 1)[0]} ..."
    return [f"  {name:{width}}{cut(text)}" for name, text in texts.items()]


def main(argv: list[str]) -> None:
    """List the commands, or run one."""
    if not argv or argv[0] in ("--help", "-h"):
        print(listing())
        return
    name = argv[0].removesuffix(".py").replace("-", "_")
    known = [*commands(), *HIDDEN[2:]]
    if name not in known:
        near = f"; {MEANT[name]}" if name in MEANT else did_you_mean(name, known)
        raise UsageError(f"there is no command {argv[0]}{near}", do="python -m megatron lists them")
    sys.argv = [f"python -m megatron.tools.{name}", *argv[1:]]
    runpy.run_module(f"megatron.tools.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    mistyped = __spec__.name.rpartition(".")[2]  # of a command that does not exist: see megatron/__init__.py
    run_main(main, sys.argv[1:] if mistyped == "__main__" else [mistyped])
