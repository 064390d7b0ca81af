# SPDX-License-Identifier: Apache-2.0
"""What watches a run: heartbeats, stop requests, the sample ledger, numerical guards, and the supervisor's parts."""
