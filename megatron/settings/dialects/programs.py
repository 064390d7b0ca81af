# SPDX-License-Identifier: Apache-2.0
"""Programs around a training in the scripts of other suites: which of ours takes their flags, or what there is instead."""

# name of a script or module -> ours, which takes the flags as they are
OURS = {"preprocess_data.py": "preprocess_data.py", "merge_datasets.py": "merge_datasets.py"}
TOOLS = {"create_pretraining_data.py": "create_pretraining_data"}  # in megatron.tools, where it is there
WEB = "web pages are not collected or cleaned here; any JSON lines are taken by preprocess_data.py --input"
INSTEAD = {
    **dict.fromkeys(
        """blacklist_urls.py download.py cleanup_dataset.py cleanup_fix_dataset.py find_duplicates.py group_duplicate_url.py
        remove_group_duplicates.py""".split(),
        WEB,
    ),
    "wikiextractor.WikiExtractor": "it runs as it is; preprocess_data.py --input text/ takes the folders that it writes",
    "shuf": "it runs as it is, and need not: training shuffles samples by --seed",
    "create_pretraining_data.py": "preprocess_data.py --input PATH --output-prefix P --append-eod makes token files",
    "tools/eval.py": "python -m megatron.tools.evaluate --load DIR -c FILE",
    "tools/inference.py": "python -m megatron.tools.generate --load DIR -c FILE",
    "tools/export.py": "python -m megatron.tools.checkpoint to-hf writes weights for other programs",
}
