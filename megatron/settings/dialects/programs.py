# SPDX-License-Identifier: Apache-2.0
"""Programs around a training in the scripts of other suites: which of ours takes their flags as they are."""

# name of a script or module -> ours
OURS = {
    "preprocess_data.py": "preprocess_data.py",
    "merge_datasets.py": "merge_datasets.py",
    "create_pretraining_data.py": "-m megatron.tools.create_pretraining_data",
    "raw_trans_to_json.py": "-m megatron.tools.raw_trans_to_json",
    "shuf": "-m megatron.tools.shuf",
    "wikiextractor.WikiExtractor": "-m megatron.tools.wiki",
    "tools/eval.py": "-m megatron.tools.evaluate",
    "tools/inference.py": "-m megatron.tools.generate",
    **{
        f"{name}.py": f"-m megatron.tools.openwebtext.{name}"
        for name in """blacklist_urls download cleanup_dataset cleanup_fix_dataset find_duplicates group_duplicate_url
        remove_group_duplicates filter_ngrams""".split()
    },
}
# what there is for a program with other flags
INSTEAD = {
    "tools/export.py": "python -m megatron.tools.checkpoint to-hf writes weights for other programs",
    "run_eval.py": "python -m megatron.tools.evaluate --load DIR --eval-path FILE evaluates",
    "run_generation.py": "python -m megatron.tools.generate --load DIR --prompt TEXT generates",
}
# programs that train
TRAINS = "run_pretrain.py run_pretrain_static.py".split()


def here_for(name: str) -> str:
    """What there is for another suite's script, by its name; "" for one that nobody knows."""
    return "pretrain_gpt.py" if name in TRAINS else OURS.get(name) or INSTEAD.get(name, "")
