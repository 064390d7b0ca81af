#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# auto_gpt_1.3B_dp8.sh, which times the best three layouts over five steps each first.
# Learning rate, batch and precision are this suite's. PaddleFleetX's:
# python pretrain_gpt.py -c ppfleetx/configs/nlp/gpt/auto/pretrain_gpt_1.3B_dp8_tuning.yaml
source "$(dirname "$0")/auto_gpt_1.3B_dp8.sh" --tune-steps 5 "$@"
