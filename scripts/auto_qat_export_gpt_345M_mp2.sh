#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Programs for two ranks that share the model, of what qat_gpt_345M_single_card.sh trained: they round as training did.
#
#   CHECKPOINTS=... EXPORT=... bash scripts/auto_qat_export_gpt_345M_mp2.sh
export CHECKPOINTS=${CHECKPOINTS:-checkpoints/qat_gpt_345M}
exec bash "$(dirname "$0")/export_gpt_345M_tp2.sh" "$@"
