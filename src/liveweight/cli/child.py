"""Runs `liveweight`, or another module, as a child process that ends with its parent, even if the parent is killed.

Run as `python -m liveweight.cli.child PID COMMAND...`, or `... PID -m MODULE ARGUMENTS...`, by the process with that id.
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import threading


def main() -> None:
    """Run the program, and a thread that watches the parent."""
    parent = int(sys.argv.pop(1))
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:
        raise SystemExit(f"process {parent} has ended before its child began")
    threading.Thread(target=_follow, args=(descriptor,), name="parent", daemon=True).start()
    if sys.argv[1:2] == ["-m"]:
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    from liveweight.cli.main import run

    run()


def _follow(descriptor: int) -> None:
    """Send SIGTERM, so that the program cleans up; a second SIGTERM does not wait for requests."""
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
