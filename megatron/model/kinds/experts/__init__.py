# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: router, balancing, dispatch of tokens, experts."""
