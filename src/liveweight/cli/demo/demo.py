"""`liveweight demo`: a small RL run whose engines get every step's weights while they generate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from liveweight.cli.exit_codes import INTERRUPTED
from liveweight.cli.mode_option import mode_option
from liveweight.errors import MissingExtra

if TYPE_CHECKING:
    from liveweight.integrations.vllm.server_process import VllmLaunching
    from liveweight.lab.demo.demo import DemoOutcome
    from liveweight.lab.demo.records import Listener
    from liveweight.lab.demo.settings import DemoSettings, Launching
    from liveweight.lab.demo.trainer_rounds import MakePublisher
    from liveweight.lab.demo.watched_replica import WatchedReplica
    from liveweight.trainer.publisher import RoundPublisher

ROUND_S, LEASE_S = 30.0, 3.0
_NEEDED = ("fastapi", "jinja2", "tokenizers", "torch", "transformers", "uvicorn")


Engine = Annotated[
    Literal["embedded", "vllm"],
    typer.Option(help="What generates: `liveweight serve`, or vLLM's own server."),
]
VllmPython = Annotated[
    Path | None,
    typer.Option(
        envvar="LIVEWEIGHT_VLLM_PYTHON",
        dir_okay=False,
        exists=True,
        help="The Python of vLLM's environment, which has liveweight, too.",
    ),
]
Mode = Annotated[str, mode_option("How ranks read new weights.")]
Replicas = Annotated[int, typer.Option(min=1, max=8, help="Engines; of two ranks each, or vLLM's of one.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps of each run.")]
Kv = Annotated[
    Literal["recompute", "reuse", "drop"], typer.Option(help="What a commit does to running requests.")
]
Staleness = Annotated[
    int, typer.Option(min=0, max=16, help="Versions that a sample may lie behind the weights that learn.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of weights and questions.")]
Chaos = Annotated[
    bool, typer.Option("--chaos", help="Cut connections, let deadlines run out, kill ranks and engines.")
]
Control = Annotated[bool, typer.Option("--control/--no-control", help="Also run without publishing.")]


def _directory(place: Path) -> Path:
    """Check this before the run, not after it."""
    if place.exists() and not place.is_dir():
        raise typer.BadParameter(f"{place} is not a directory")
    return place


Out = Annotated[Path, typer.Option(callback=_directory, metavar="DIR", help="Where the report is written.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print an object per step, and the summary last.")]


def demo(
    context: typer.Context,
    engine: Engine = "embedded",
    vllm_python: VllmPython = None,
    mode: Mode = "ipc",
    replicas: Replicas = 1,
    steps: Steps = 100,
    kv_policy: Kv = "recompute",
    staleness: Staleness = 2,
    seed: Seed = 0,
    chaos: Chaos = False,
    control: Control = True,
    out: Out = Path("report"),
    as_json: AsJson = False,
) -> None:
    """Train a small model by RL, and publish every step into engines that generate all the time.

    A trainer learns to sort digits from rewards alone (GRPO). Its rollouts come from `liveweight serve`, over HTTP; commits land inside
    running requests. Then the same once more without publishing, for comparison. A report is written at the end. The exit code is 0
    after a whole demo, 130 after Ctrl-C, 1 after an error.

    For example: liveweight demo --steps 60 --kv-policy reuse
    """
    if context.invoked_subcommand is not None:
        return
    from liveweight.lab.demo.settings import DemoSettings

    _check(engine, vllm_python, chaos=chaos)
    settings = DemoSettings(
        engine=engine,
        mode=mode,
        replicas=replicas,
        steps=steps,
        kv_policy=kv_policy,
        staleness=staleness,
        seed=seed,
        chaos=chaos,
        control=control,
    )
    run(settings, out, as_json=as_json, vllm_python=vllm_python)


def _check(engine: str, python: Path | None, *, chaos: bool) -> None:
    """Refuse what vLLM cannot do before anything is started."""
    if engine != "vllm":
        return
    if python is None:
        raise typer.BadParameter("--engine vllm needs --vllm-python, such as .venv-vllm/0.32.0/bin/python")
    if chaos:
        raise typer.BadParameter("--engine vllm has no --chaos: vLLM does not replace ranks")


def run(settings: DemoSettings, out: Path, *, as_json: bool, vllm_python: Path | None = None) -> None:
    """Run the demo from its first import to its report."""
    from liveweight.cli.demo.view import viewing

    try:
        _import_all()
        with viewing(settings, as_json=as_json) as view:
            outcome = play(settings, view, vllm_python)
            written = None if outcome is None else _report(outcome, settings, out)
    except KeyboardInterrupt:  # before anything was started: later signals do not raise
        raise typer.Exit(INTERRUPTED) from None
    if outcome is None:
        raise typer.Exit(INTERRUPTED)
    if not as_json:
        print(f"report: {written}")


def _import_all() -> None:
    """Import everything heavy first: until something has been started, Ctrl-C may end the program anywhere."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise MissingExtra("the demo", "demo")
    import torch
    from transformers import Qwen3ForCausalLM

    del Qwen3ForCausalLM
    torch.set_num_threads(1)  # the engine's ranks need the other cores


def play(settings: DemoSettings, emit: Listener, vllm_python: Path | None = None) -> DemoOutcome | None:
    """Run the demo, and send its records to `emit`. Returns None after Ctrl-C; then nothing of the demo is left."""
    from liveweight.cli.signals import stopped_by_signals
    from liveweight.lab.demo.demo import run_demo
    from liveweight.lab.demo.stopping import RunStopped, Stop

    launching = _launching(vllm_python if settings.engine == "vllm" else None)
    with Stop() as stop, stopped_by_signals(stop):
        try:
            return run_demo(settings, launching, _publishers(settings), emit=emit, stop=stop)
        except RunStopped:
            return None


def _launching(vllm_python: Path | None) -> Launching | VllmLaunching:
    """How to start engines that end with this program, even if it is killed."""
    from liveweight.lab.demo.settings import Launching

    if vllm_python is not None:
        return vllm_launching(vllm_python)
    return Launching(program=(sys.executable, *_child_command(), "serve"), environment=dict(os.environ))


def vllm_launching(python: Path) -> VllmLaunching:
    """How to start a vLLM that ends with this program, even if it is killed."""
    from liveweight.integrations.vllm.server_process import VllmLaunching

    return VllmLaunching(
        python=python.absolute(), runs=(*_child_command(), "-m"), environment=dict(os.environ)
    )


def _child_command() -> tuple[str, ...]:
    return "-m", "liveweight.cli.child", str(os.getpid())


def _publishers(settings: DemoSettings) -> Callable[[Path], MakePublisher]:
    """Make `lw.Publisher` as a training loop does, with the sockets and the secret of this demo."""
    from liveweight.api import Publisher as ApiPublisher

    def for_directory(directory: Path) -> MakePublisher:
        def make(model: object, fleet: Sequence[WatchedReplica]) -> RoundPublisher:
            return ApiPublisher(
                model,
                engines=fleet,
                secret=directory / "secret",
                directory=directory,
                transfer_mode=settings.mode,
                kv_policy=settings.kv_policy,
                timeout_s=ROUND_S,
                lease_s=LEASE_S,
                threads=1,
            )

        return make

    return for_directory


def _report(outcome: DemoOutcome, settings: DemoSettings, out: Path) -> Path:
    from liveweight.lab.demo.report.page import write_report

    return write_report(out, outcome, settings)
