# SPDX-License-Identifier: Apache-2.0
"""Monitoring of a run: heartbeats, stop requests, the sample ledger, numerical guards, and the supervisor's parts."""
