# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: routing, balancing, the exchange of tokens, and the layer."""
