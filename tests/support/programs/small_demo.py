"""`liveweight demo` with little to learn: the same program and processes, a shorter warm-up, smaller batches. Run as `-m`."""

from __future__ import annotations

from functools import partial

from liveweight.cli import main
from liveweight.lab.demo import settings

TRAINING = settings.Training(warmup_steps=10, warmup_batch=32, prompts=8, checked=8)

if __name__ == "__main__":
    setattr(settings, "DemoSettings", partial(settings.DemoSettings, training=TRAINING))  # noqa: B010
    main.run()
