# SPDX-License-Identifier: Apache-2.0
"""Files that survive a power cut, and what stands for them elsewhere."""
