# SPDX-License-Identifier: Apache-2.0
"""`--preflight`: check a training before it is started. Start reading at `run.preflight`."""
