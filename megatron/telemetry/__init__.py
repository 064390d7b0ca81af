# SPDX-License-Identifier: Apache-2.0
"""The output of a run: log, metrics, timers, trackers, profiles, reports."""
