#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for export_gpt_345M_tp2.sh.
exec bash "$(dirname "$0")/export_gpt_345M_tp2.sh" "$@"
