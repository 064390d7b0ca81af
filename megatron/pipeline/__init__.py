# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: schedules, their simulation, and the loop that runs them."""
