#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for evaluate_gpt_345M.sh.
exec bash "$(dirname "$0")/evaluate_gpt_345M.sh" "$@"
