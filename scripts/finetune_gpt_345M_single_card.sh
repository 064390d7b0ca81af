#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A script of PaddleFleetX that has no counterpart here: says so, and ends with 3.
echo "error: fine-tuning on tasks (GLUE) is not part of this suite; pretrain_gpt.py --load DIR --finetune goes on from weights" >&2
exit 3
