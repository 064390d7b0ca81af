# SPDX-License-Identifier: Apache-2.0
"""Settings: declared once (schema), read (parse), checked (rules)."""
