# SPDX-License-Identifier: Apache-2.0
"""Faults, injected and counted: what `python -m tests.chaos` does to training jobs and to their files."""
