"""Trainers of several processes: one asks engines for all, and all have the same outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trl.harness import ServedEngine
from tests.trl.rank_processes import exit_codes, heard, tell_all, trainer_ranks


@pytest.mark.parametrize("spread", ["ddp", "fsdp2", "fsdp2-lora"])
def test_two_processes_learn_from_one_engine_and_fail_together(
    model: Path, tmp_path: Path, place: Path, spread: str
) -> None:
    with (
        ServedEngine(model, place) as own,
        trainer_ranks("ranks_program", str(model), str(tmp_path), own.url, spread, place=tmp_path) as ranks,
    ):
        first, second = (heard(rank, tmp_path) for rank in ranks)
        assert (first["index"], second["index"]) == (0, 1)
        assert first["verified"] is True
        assert first["sharded"] is second["sharded"] is spread.startswith("fsdp2")
        assert first["publishes"] is True
        assert second["publishes"] is spread.startswith("fsdp2")  # each publishes the shards that it holds
        assert first["difference"] < 1e-4
        assert first["rewards"] == second["rewards"]
        assert len(first["seconds"]) == 2
        assert own.rounds()[0][0] == "step_0"
        assert [label for label, _ in own.rounds()] == ["step_0", "step_1", "step_2"]
        own.kill()
        tell_all(ranks)
        errors = [heard(rank, tmp_path)["error"] for rank in ranks]
        assert all(own.url in error for error in errors)
        assert exit_codes(ranks) == [0, 0]
