# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders: T5 and related models."""
