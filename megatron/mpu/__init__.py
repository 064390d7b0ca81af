# SPDX-License-Identifier: Apache-2.0
"""Model parallelism. Functions such as `mpu.get_tensor_model_parallel_rank()` are in `parallel_state.py`."""


def __getattr__(name: str):
    if name.startswith(("get_", "is_", "model_parallel_is_")):
        from megatron.mpu import parallel_state

        if hasattr(parallel_state, name):
            return getattr(parallel_state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
