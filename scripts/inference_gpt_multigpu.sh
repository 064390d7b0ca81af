#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# inference_gpt_175B_tp8.sh on MP ranks (8 unless set), which share the model.
NPROC=${MP:-${NPROC:-8}} exec bash "$(dirname "$0")/inference_gpt_175B_tp8.sh" "$@"
