"""A trainer without vLLM publishes into a real vLLM server, which runs in another environment."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import httpx
import pytest

import liveweight as lw
from liveweight.errors import ManifestMismatch
from tests.vllm.models import llama
from tests.vllm.serving import WITHIN_S, Answer, Server, asked

pytestmark = pytest.mark.timeout(1200)

CLIENTS, UPDATES = 8, 20
LONG = tuple(5 + position % 400 for position in range(200))
"""A prompt of more than one block."""


def publisher(server: Server, source: object, **settings: object) -> lw.Publisher:
    """One that drives this server."""
    return lw.Publisher(
        source,
        engines=[lw.vllm(server.url)],
        secret=server.secret,
        timeout_s=WITHIN_S,
        **settings,  # type: ignore[arg-type]
    )


def test_the_trainer_of_these_tests_has_no_vllm() -> None:
    assert importlib.util.find_spec("vllm") is None


def test_what_is_published_answers_as_a_fresh_vllm_and_undo_brings_the_start_back(
    server: Server, before: Answer, fresh: Answer, new: Path
) -> None:
    assert before != fresh
    with publisher(server, new) as trainer:
        report = trainer.publish("step_1")
        assert server.answer() == fresh
        assert server.get("/weight_info") == {"weight_version": "step_1"}
        assert not server.get("/is_paused")["is_paused"]
        assert report.verified
        assert trainer.verify().match
        trainer.undo()
        assert server.answer() == before
        trainer.publish("step_1")
        assert server.answer() == fresh


def test_a_module_is_published_like_a_checkpoint(
    server: Server, before: Answer, fresh: Answer, base: Path
) -> None:
    with publisher(server, llama(1)) as trainer:
        trainer.publish("module")
        assert server.answer() == fresh
    with publisher(server, base) as trainer:
        trainer.publish("back")
    assert server.answer() == before


def test_what_vllm_computes_with_is_read_back_where_it_is_not_packed_away(
    server: Server, before: Answer, base: Path, new: Path
) -> None:
    with publisher(server, new) as trainer:
        trainer.publish("read")
        (found,) = trainer.verify().replicas
        assert found.verdict is not None
        assert found.match
        unread = found.verdict.unread
        if server.packs():
            # What is read: embeddings, two norms of each layer, and the last one.
            assert (found.read, found.verdict.tensors - unread) == ("staged", 8)
        else:
            assert (found.read, unread) == ("installed", 0)
        server.tell_workers("change_a_norm")
        (found,) = trainer.verify().replicas
        assert found.verdict is not None
        assert [(one.name, one.ranks) for one in found.verdict.mismatches] == [("model.norm.weight", (0,))]
    with publisher(server, base) as trainer:
        trainer.publish("back")
    assert server.answer() == before


def test_once_vllm_has_loaded_a_version_the_next_ones_are_copied_to_where_it_put_them(
    server: Server, before: Answer, fresh: Answer, base: Path
) -> None:
    with publisher(server, llama(1)) as one, publisher(server, base) as other:
        one.publish("first")
        assert server.answer() == fresh
        other.publish("second")
        assert [bool(int(copies)) for copies in server.tell_workers("copies")] == [not server.packs()]
        assert server.answer() == before
        server.tell_workers(
            "change_a_norm"
        )  # nothing that was learned before is held against vLLM's weights now
        one.publish("third")
        assert server.answer() == fresh
        other.publish("fourth")
    assert server.answer() == before


def test_other_tensors_are_refused_by_name_before_anything_is_sent(server: Server, before: Answer) -> None:
    tensors = llama(1).state_dict()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with (
        pytest.raises(ManifestMismatch, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing"),
        publisher(server, tensors),
    ):
        pass
    assert server.answer() == before


def test_running_requests_may_go_on_with_their_kv_and_nobody_else_finds_it(
    server: Server, spare: Server, before: Answer, base: Path
) -> None:
    started, over, reasons = threading.Event(), threading.Event(), list[str]()
    client = threading.Thread(target=_stream, args=(server, over, reasons, started))
    was = server.answer(8, LONG)
    hits = server.counted("prefix_cache_hits")
    assert server.answer(8, LONG) == was
    assert server.counted("prefix_cache_hits") > hits, "vLLM keeps prefixes of this length"
    with publisher(server, llama(1), kv_policy="reuse") as trainer:
        client.start()
        try:
            assert started.wait(WITHIN_S)
            hits, preempted = server.counted("prefix_cache_hits"), server.counted("num_preemptions")
            trainer.publish("reused")
            assert server.answer(8, LONG) == spare.answer(8, LONG) != was
            assert server.counted("prefix_cache_hits") == hits, "not even of the same prompt"
            assert server.counted("num_preemptions") == preempted
        finally:
            over.set()
            client.join(WITHIN_S)
    assert set(reasons) == {"length"}
    with publisher(server, base) as trainer:
        trainer.publish("back")
    assert server.answer() == before
    assert server.answer(8, LONG) == was


def test_answers_say_which_version_served(server: Server, before: Answer, base: Path) -> None:
    with publisher(server, base) as trainer:
        number = trainer.publish("named").version.number
        assert number is not None
        for demand, status in (
            ({"min": number, "exact": "named", "run": trainer.run}, 200),
            ({"min": number + 1}, 409),
        ):
            body = {**asked(2), "weight_version": demand}
            demanded = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WITHIN_S)
            assert demanded.status_code == status, demanded.text
        assert demanded.json()["error"]["serving"]["number"] == number
        said = httpx.post(f"{server.url}/v1/completions", json=asked(2), timeout=WITHIN_S)
        assert (said.headers["x-weight-version"], said.headers["x-weight-version-finished"]) == (
            "named",
            "named",
        )
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**asked(2), "stream": True}, timeout=WITHIN_S
        ) as stream:
            lines = list(stream.iter_lines())
    assert stream.headers["x-weight-version"] == "named"
    assert ': weight-version {"admitted": "named", "finished": "named"}' in lines
    assert server.answer() == before


def test_twenty_updates_while_clients_stream_and_none_of_them_fails(
    server: Server, before: Answer, fresh: Answer, base: Path
) -> None:
    over = threading.Event()
    finished: list[list[str]] = [[] for _ in range(CLIENTS)]
    clients = [threading.Thread(target=_stream, args=(server, over, reasons)) for reasons in finished]
    for client in clients:
        client.start()
    try:
        with publisher(server, llama(1)) as one, publisher(server, base) as other:
            for step in range(UPDATES // 2):
                one.publish(f"odd_{step}")
                assert server.answer() == fresh
                other.publish(f"even_{step}")
                assert server.answer() == before
    finally:
        over.set()
        for client in clients:
            client.join(WITHIN_S)
    assert all(reasons and set(reasons) == {"length"} for reasons in finished), finished


def _stream(
    server: Server, over: threading.Event, reasons: list[str], started: threading.Event | None = None
) -> None:
    """One client: a request after the other, each to its end, until it is over; and at least one."""
    body = {**asked(40), "stream": True, "logprobs": None}
    while not over.is_set() or not reasons:
        last = None
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WITHIN_S) as said:
            for line in said.iter_lines():
                if started is not None:
                    started.set()
                if '"finish_reason":"' in line:
                    last = line.partition('"finish_reason":"')[2].partition('"')[0]
        reasons.append(str(last))
