# SPDX-License-Identifier: Apache-2.0
"""A live page of runs: `python -m megatron.tools.dashboard`."""
