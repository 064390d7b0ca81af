#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Export what pretrain_gpt_345M_single.sh trained, for Hugging Face transformers, or with --format for llama.cpp (gguf),
# ONNX (onnx) or as a program of torch (torch-export). On a CPU; nothing is written unless both sides compute the same.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/export_gpt_345M.sh --format gguf --dtype bf16
source "$(dirname "$0")/_trained.sh"
export_model 345M 1 "" "$@"
