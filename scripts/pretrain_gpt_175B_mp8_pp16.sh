#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for pretrain_gpt_175B_tp8_pp16.sh.
exec bash "$(dirname "$0")/pretrain_gpt_175B_tp8_pp16.sh" "$@"
