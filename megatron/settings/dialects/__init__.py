# SPDX-License-Identifier: Apache-2.0
"""Tables that translate other suites' flags and YAML keys."""
