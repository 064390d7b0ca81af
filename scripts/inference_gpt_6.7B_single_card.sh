#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Another name for inference_gpt_6.7B.sh.
exec bash "$(dirname "$0")/inference_gpt_6.7B.sh" "$@"
