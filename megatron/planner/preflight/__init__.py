# SPDX-License-Identifier: Apache-2.0
"""`--preflight`: what can be tried of a training before it is started. `run.preflight` is the story."""
