# SPDX-License-Identifier: Apache-2.0
"""Files that lie in an object store: what checkpoints and token files need of one. Plain paths never come here."""
