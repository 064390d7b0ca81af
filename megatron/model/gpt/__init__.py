# SPDX-License-Identifier: Apache-2.0
"""GPT: its module, its facts, its rules, and its names in other libraries."""
