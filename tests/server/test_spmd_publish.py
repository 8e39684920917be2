"""A trainer of two ranks publishes to a served engine by its URL: the engine says what it would say if it had been started on that."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.cli.test_push import live, said, secret_file
from tests.support.engine.engines import Models
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import Zygote
from tests.support.rounds import all_of


def test_a_served_engine_takes_what_two_trainer_ranks_hold(
    models: Models, short_path: Path, zygote: Zygote, cluster: Cluster
) -> None:
    old, new = models.directory(), models.directory(seed=1)
    with live(zygote, short_path, new) as reference:
        expected = said(reference.url)["text"]
        digest = httpx.get(f"{reference.url}/v1/weights").json()["version"]["digest"]
    with live(zygote, short_path, old) as served:
        assert said(served.url)["text"] != expected
        trainer = cluster.trainer_ranks(
            2, engines=[served.url], checkpoint=str(new), secret=str(secret_file(short_path))
        )
        reports = all_of(trainer, "publish", label="step_1")
        assert [(report["version"], report["digest"]) for report in reports] == [("step_1", digest)] * 2
        after = said(served.url)
        assert (after["text"], after["weight_version"]["label"]) == (expected, "step_1")
