# SPDX-License-Identifier: Apache-2.0
"""GPT: its weights, its module, its facts, and its names in other programs."""
