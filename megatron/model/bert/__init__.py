# SPDX-License-Identifier: Apache-2.0
"""BERT: an encoder that is trained to predict masked tokens."""
