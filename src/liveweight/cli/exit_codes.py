"""Exit codes, in one table, which `liveweight --help` and docs/operations.md show."""

from __future__ import annotations

from dataclasses import dataclass

DONE = 0
FAILED = 1
WRONG_ARGUMENTS = 2  # typer's own
RANK_LOST = 3
DIFFERENT = 3
INTERRUPTED = 130  # as shells have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a code means, and the commands that can exit with it."""

    code: int
    commands: str
    means: str


EXITS = (
    Meaning(code=DONE, commands="all", means="done; `serve` and `offer` also after SIGINT or SIGTERM"),
    Meaning(code=FAILED, commands="all", means="failed: one line on stderr says why, and what to do"),
    Meaning(code=FAILED, commands="`status`", means="an engine does not answer"),
    Meaning(code=FAILED, commands="`doctor`", means="something is broken"),
    Meaning(
        code=FAILED, commands="`demo torn`", means="a token on liveweight's side matched neither version"
    ),
    Meaning(
        code=FAILED,
        commands="`torture`",
        means="something was torn, late, leaked or lost; in place, that no token was torn",
    ),
    Meaning(code=WRONG_ARGUMENTS, commands="all", means="wrong arguments; nothing was begun"),
    Meaning(code=DIFFERENT, commands="`verify`", means="an engine holds other weights"),
    Meaning(code=RANK_LOST, commands="`serve`", means="a rank was lost"),
    Meaning(
        code=INTERRUPTED, commands="all others", means="ended by Ctrl-C; `demo` also by SIGTERM or SIGHUP"
    ),
)


def exit_codes_text() -> str:
    """The table in a paragraph, for `--help`."""
    return (
        "Exit codes: "
        + "; ".join(f"{row.code} ({row.commands.replace('`', '')}) {row.means}" for row in EXITS)
        + "."
    )
