"""Signals, umask, variables and locale of the test session: set here once, whatever the session inherits.

tests/cli/test_surroundings.py starts programs in hostile surroundings on purpose.
"""

from __future__ import annotations

import locale
import os
import signal
import tempfile
from pathlib import Path

UMASK = 0o022
UTF8 = "C.UTF-8"
SWITCHES = {"LIVEWEIGHT_PADDLE_PYTHON", "LIVEWEIGHT_VLLM_PYTHON", "LIVEWEIGHT_OTHER_PYTHON"}
"""Variables by which the Makefile tells what there is to test."""
DROPPED_PREFIXES = (
    "LIVEWEIGHT_",
    "FD_",
    "HF_",
    "TRANSFORMERS_",
    "XDG_",
    "LC_",
    "PYTHON",
    "TYPER_",
    "_TYPER_",
)
DROPPED = {
    *(
        "LANGUAGE",
        "TERM",
        "COLORTERM",
        "COLUMNS",
        "LINES",
        "TERMINAL_WIDTH",
        "TTY_COMPATIBLE",
        "TTY_INTERACTIVE",
    ),
    *("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR", "CLICOLOR_FORCE"),
    "GITHUB_ACTIONS",  # typer takes it for a terminal
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
}
"""In capitals; the proxies have names in small letters, too."""
TEMPORARY_BYTES = 16
"""The longest temporary directory that the session keeps. A unix socket's path has at most 107 bytes; pytest's directory for a test
takes 66 of them, and more where the name of the user is long.
"""


def settle() -> None:
    """Give this process, and every process that it starts, the same surroundings wherever the session was started. Main thread only.

    SIGHUP stays as it is: a session under nohup is to survive its terminal.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.umask(UMASK)
    for name in [name for name in os.environ if _dropped(name)]:
        del os.environ[name]
    os.environ["LANG"] = UTF8
    locale.setlocale(locale.LC_CTYPE, UTF8)
    os.environ.setdefault("UCX_LOG_FILE", "/dev/stderr")  # its own choice is stdout, where our programs talk
    if len(os.fsencode(tempfile.gettempdir())) > TEMPORARY_BYTES:
        for name in ("TMPDIR", "TEMP", "TMP"):
            os.environ.pop(name, None)
        tempfile.tempdir = None


def _dropped(name: str) -> bool:
    return name.upper() in DROPPED or (name.startswith(DROPPED_PREFIXES) and name not in SWITCHES)


def own_home() -> tempfile.TemporaryDirectory[str]:
    """A home directory for the session, empty and writable, until it is cleaned up."""
    home = tempfile.TemporaryDirectory(prefix="lw-home-")
    os.environ["HOME"] = home.name
    return home


def umask() -> int:
    """That of this process, as the kernel tells it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Umask:")), 8)
