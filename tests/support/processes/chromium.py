"""Headless Chromium: what a page is like once it has been laid out."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ),
)
WITHIN_S = 120


def chromium() -> str:
    """The program; without it the test is skipped, and says why."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("chromium is not installed")
    return found


def measured(page: Path, script: str, directory: Path) -> Any:
    """What a script, run in the laid out page, returns. The page itself is not changed: a copy is opened."""
    report = f"JSON.stringify((() => {{ {script} }})())"
    script = f"<script>document.body.dataset.measured = {report};</script></body>"
    copy = directory / "measured.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    command = [
        chromium(),
        *FLAGS,
        f"--user-data-dir={directory / 'profile'}",
        "--window-size=1000,2000",
        "--dump-dom",
        copy.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True)
    found = re.search(r'<body data-measured="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))
