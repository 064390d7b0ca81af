# SPDX-License-Identifier: Apache-2.0
"""Other suites' flags and YAML keys, and what each of them means here."""
