#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for pretrain_gpt_345M_single.sh.
exec bash "$(dirname "$0")/pretrain_gpt_345M_single.sh" "$@"
