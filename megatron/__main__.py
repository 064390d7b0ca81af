# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron`: see `megatron.tools.__main__`."""

from megatron.errors import run_main
from megatron.tools.__main__ import main

if __name__ == "__main__":
    run_main(main)
