"""An engine in place whose ranks, or trainer, fail in the middle of an overwriting, under clients: never a mixture, and the next heals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from liveweight.errors import RankLost
from tests.faults.test_engine_faults import PROMPTS, Judge
from tests.support.engine.engine_scene import scene
from tests.support.engine.engines import Logits, Models, answers, greedy
from tests.support.processes.cluster import Cluster
from tests.support.processes.fork_server import Zygote
from tests.support.processes.real_servers import until
from tests.support.processes.stopping import stop
from tests.support.rounds import publish_when_free


@pytest.mark.parametrize("fault", ["trainer killed", "rank stopped", "rank killed", "source revoked"])
def test_a_fault_in_the_middle_of_an_overwriting(
    cluster: Cluster,
    zygote: Zygote,
    models: Models,
    transformers_logits: Callable[[Path], Logits],
    fault: str,
) -> None:
    short = {"timeout_s": 6.0, "lease_s": 2.0, "step_s": 120.0} if fault == "rank stopped" else {}
    with scene(cluster, zygote, models, shadow="none", **short) as place:
        judge = Judge(transformers_logits, place)
        with place.clients() as clients, place.held_at("overwriting", 2) as held:
            match fault:
                case "trainer killed":
                    place.trainer.kill()
                    held.go()
                    until(lambda: place.engine.status().weights.startswith("2@"), "the new version")
                case "rank stopped":
                    stop(place.engine.pids[1])
                    error = place.trainer.end(held.call)["error"]
                    assert (error["code"], error["rank"]) == ("LW-601", 1)
                    os.kill(place.engine.pids[1], signal.SIGCONT)
                    held.go()
                case "rank killed":
                    os.kill(place.engine.pids[1], signal.SIGKILL)
                    held.gone()
                    assert place.trainer.end(held.call)["error"]["code"] in ("LW-601", "LW-205", "LW-602")
                case "source revoked":
                    place.trainer.ask("revoke")
                    held.go()
                    assert place.trainer.end(held.call)["error"]["code"] == "LW-601"
            if fault in ("rank stopped", "source revoked"):
                until(lambda: place.engine.status().state == "torn", "a torn engine")
        judge.no_mixture(clients)
        if fault == "rank killed":
            with pytest.raises(RankLost, match="rank 1"):
                answers(place.engine, PROMPTS, greedy(4))[0].finish  # noqa: B018
            place.engine.stop()
            place.start_engine()
        if fault == "trainer killed":
            judge.serves(2)
            place.trainer = place.start_trainer(run="successor")
        assert "error" not in publish_when_free(place.trainer, 3)
        judge.serves(3)
