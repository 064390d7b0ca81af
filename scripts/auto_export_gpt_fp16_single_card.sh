#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# export_gpt_345M.sh in fp16.
exec bash "$(dirname "$0")/export_gpt_345M.sh" --dtype fp16 "$@"
