# SPDX-License-Identifier: Apache-2.0
"""Models to and from the formats of other programs."""
