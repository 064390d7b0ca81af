# SPDX-License-Identifier: Apache-2.0
"""Programs around a training in the scripts of other suites: which of ours takes their flags, or what there is instead."""

# name of a script or module -> ours, which takes the flags as they are
OURS = {"preprocess_data.py": "preprocess_data.py", "merge_datasets.py": "merge_datasets.py"}
TOOLS = {  # in megatron.tools, where it is there
    "create_pretraining_data.py": "create_pretraining_data",
    "raw_trans_to_json.py": "raw_trans_to_json",
    "shuf": "shuf",
    "wikiextractor.WikiExtractor": "wiki",
    **{
        f"{name}.py": f"openwebtext.{name}"
        for name in """blacklist_urls download cleanup_dataset cleanup_fix_dataset find_duplicates group_duplicate_url
        remove_group_duplicates filter_ngrams""".split()
    },
}
INSTEAD = {
    "create_pretraining_data.py": "preprocess_data.py --input PATH --output-prefix P --append-eod makes token files",
    "tools/eval.py": "python -m megatron.tools.evaluate --load DIR -c FILE",
    "tools/inference.py": "python -m megatron.tools.generate --load DIR -c FILE",
    "tools/export.py": "python -m megatron.tools.checkpoint to-hf writes weights for other programs",
}
