# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself: metrics, timers, trackers, profiles, the run's record."""
