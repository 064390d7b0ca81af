# SPDX-License-Identifier: Apache-2.0
"""Conversion of models to and from the formats of other libraries."""
