#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for finetune_gpt_345M.sh.
exec bash "$(dirname "$0")/finetune_gpt_345M.sh" "$@"
