#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Export what qat_gpt_345M_single_card.sh trained as a program of torch, which rounds weights and inputs as training did.
# On a CPU; nothing is written unless both sides compute the same. SHRINK=1 exports a plain model.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/export_qat_gpt_345M_single_card.sh
CHECKPOINTS=${CHECKPOINTS:-checkpoints/qat_gpt_345M}
source "$(dirname "$0")/_trained.sh"
export_model 345M 1 "--format torch-export" "$@"
