# SPDX-License-Identifier: Apache-2.0
"""The settings of pretraining, a module for each group; `schema.py` has them together."""
