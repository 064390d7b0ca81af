#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for auto_gpt_1.3B_single.sh.
# Learning rate, batch and precision are this suite's. PaddleFleetX's:
# python pretrain_gpt.py -c ppfleetx/configs/nlp/gpt/auto/pretrain_gpt_1.3B_single_card.yaml
source "$(dirname "$0")/auto_gpt_1.3B_single.sh" "$@"
