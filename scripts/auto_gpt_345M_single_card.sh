#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for auto_gpt_345M_single.sh.
exec bash "$(dirname "$0")/auto_gpt_345M_single.sh" "$@"
