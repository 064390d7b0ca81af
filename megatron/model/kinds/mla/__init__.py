# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (MLA, arXiv:2405.04434, section 2.1)."""
