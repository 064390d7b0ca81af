# SPDX-License-Identifier: Apache-2.0
"""Show the curves of runs on a web page that follows them while they train.

    python -m megatron.tools.dashboard runs
    python -m megatron.tools.dashboard runs/345M runs/1.3B s3://bucket/team/7B --port 8050

FOLDER... are the --save folders of runs, any folders above them, or prefixes of an object store. New runs in a folder
appear by themselves. The page is for this machine alone, unless --host says otherwise. docs/watching.md explains it.
"""

import importlib.util
from dataclasses import dataclass

from megatron.errors import MissingPackage, UsageError, run_main
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting

PROG = "python -m megatron.tools.dashboard"
PACKAGES = ("starlette", "uvicorn")


@dataclass(frozen=True)
class DashboardOptions:
    """Where the page is."""

    host: str = setting(
        "address to listen on; 0.0.0.0: all networks of the machine. There is no password: whoever reaches the address "
        "sees the runs",
        "127.0.0.1",
    )
    port: int = setting("port to listen on; 0: a free one", 8050)


def main(argv: list[str]) -> None:
    """Serve the page until Ctrl-C."""
    names, flags = divide(argv, DashboardOptions)
    about = "Show the curves of runs on a live web page: FOLDER... are their --save folders, or any folders above them."
    asked = parse_one(flags, DashboardOptions, f"{PROG} FOLDER ...", about)
    if not names:
        raise UsageError("which runs?", do=f"{PROG} FOLDER...")
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingPackage(f"the dashboard needs {' and '.join(missing)}", do="pip install starlette uvicorn")
    from megatron.guard.run_state import look_at
    from megatron.pipeline.recorded import pictures_of
    from megatron.telemetry.dashboard.runs import Runs
    from megatron.telemetry.dashboard.server import serve
    from megatron.telemetry.web import listen

    runs = Runs(names, lambda folder: look_at(str(folder))[0], pictures_of)
    listener = listen(asked.host, asked.port)
    host, port = listener.getsockname()[:2]
    print(f"dashboard: http://{f'[{host}]' if ':' in host else host}:{port}/  (Ctrl-C ends it)", flush=True)
    serve(runs, listener)


if __name__ == "__main__":
    run_main(main)
