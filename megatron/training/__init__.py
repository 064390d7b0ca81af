# SPDX-License-Identifier: Apache-2.0
"""Training: the loop, how a run is built, its state, and recovery."""
