#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# auto_gpt_1.3B_dp8.sh, which times the best three layouts over five steps each first.
exec bash "$(dirname "$0")/auto_gpt_1.3B_dp8.sh" --tune-steps 5 "$@"
