# SPDX-License-Identifier: Apache-2.0
"""Programs in the scripts of other suites, and the commands here that take their flags unchanged."""

# The prompts inside PaddleFleetX's programs
PROMPT, PROMPT_OF_EXPORTS = "Hi, GPT2. Tell me who Jack Ma is.", "Hi, GPT2. Tell me where is Beijing?"
_GENERATE, _GENERATE_EXPORTED = (
    f"-m megatron.tools.generate --prompt '{text}'" for text in (PROMPT, PROMPT_OF_EXPORTS)
)
# script or module -> the command here
OURS = {
    "gpt/preprocess_data.py": "-m megatron.tools.create_pretraining_data",  # PaddleFleetX's
    "preprocess_data.py": "preprocess_data.py",
    "merge_datasets.py": "merge_datasets.py",
    "create_pretraining_data.py": "-m megatron.tools.create_pretraining_data",
    "raw_trans_to_json.py": "-m megatron.tools.raw_trans_to_json",
    "shuf": "-m megatron.tools.shuf",
    "wikiextractor.WikiExtractor": "-m megatron.tools.wiki",
    "tools/eval.py": "-m megatron.tools.evaluate",
    "tools/export.py": "-m megatron.tools.export",
    "tools/auto_export.py": "-m megatron.tools.export",
    "tools/inference.py": "-m megatron.tools.generate",
    "tasks/gpt/generation.py": _GENERATE,
    "tasks/gpt/inference.py": _GENERATE,
    "projects/gpt/inference.py": _GENERATE_EXPORTED,
    "gpt/benchmark.py": "-m megatron.tools.benchmark_inference",
    **{
        f"{name}.py": f"-m megatron.tools.openwebtext.{name}"
        for name in """blacklist_urls download cleanup_dataset cleanup_fix_dataset find_duplicates group_duplicate_url
        remove_group_duplicates filter_ngrams""".split()
    },
}
# script -> the command here that takes other flags
_TEXT, _FIGURES = (f"python -m megatron.tools.{name} --load DIR" for name in ("generate", "evaluate"))
INSTEAD = {
    "run_eval.py": f"{_FIGURES} takes --eval_path and --overlapping_eval",
    "run_generation.py": f"{_TEXT} has --prompt, --top_k, --top_p and --temperature",
}
# commands of one process, which writes what each rank needs
ALONE = ("-m megatron.tools.export",)
