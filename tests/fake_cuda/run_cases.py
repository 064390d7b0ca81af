# SPDX-License-Identifier: Apache-2.0
"""Training steps on CUDA devices that are not there: what a GPU would stumble over, found without one.

    python tests/fake_cuda/run_cases.py fake_cuda.so < cases.json      # a line of JSON for each case

A case is a command line and a place in a job of any size. The real code builds the run and trains: its tensors say
"cuda" and have no memory (torch's FakeTensorMode), its process group sends nothing (torch's "fake" backend). What is
seen: operators that mix devices or formats, with the line; every point where the host waits for the device (`HostWaits`).
What is not: streams and events, random numbers of the device, NCCL, and values, which are all made up.
"""

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "megatron")


def load(library: str) -> None:
    """Make a CPU build of torch believe in a CUDA device. Before torch is imported."""
    torch_libraries = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    for path in (torch_libraries / "libc10.so", torch_libraries / "libtorch_cpu.so", library):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def main(library: str) -> None:
    load(library)
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import fake_run

    for case in json.load(sys.stdin):
        sys.stdout.flush()
        if child := os.fork():  # each case alone: process groups and counters do not go from one to the next
            os.waitpid(child, 0)
            continue
        try:
            found = importlib.import_module("fake_calls").called() if case == "calls" else fake_run.run(**case)
        except BaseException as error:
            frames = [
                frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)
            ]
            where = [f"{os.path.relpath(frame.filename, ROOT)}:{frame.lineno}" for frame in frames]
            found = dict(error=f"{type(error).__name__}: {error}"[:500], where=where)
            if "--debug" in sys.argv:
                traceback.print_exc()
        print(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
