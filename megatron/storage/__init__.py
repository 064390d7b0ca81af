# SPDX-License-Identifier: Apache-2.0
"""Files for checkpoints and data: object stores, durable writes, locks, and files of arrays."""
