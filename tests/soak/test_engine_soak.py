"""Two thousand requests to `liveweight serve`: memory, descriptors and threads do not grow, and every page comes back."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from typing import Any

import httpx
import pytest

from tests.support.engine.engines import WITHIN_S, Models
from tests.support.processes.real_servers import until
from tests.support.processes.serve_processes import Process, ended, process_of, program, ranks_of, url_of

WARM_UP, REQUESTS = 300, 2000
AT_ONCE = 80
KV_MB = 8
"""A cache that a few requests fill, so that its memory is in use after the warm-up, and pages change hands all the time."""
GROWTH_KB = 6 * 1024
PREFIXES = tuple(f"Conversation {number}. " + "All of this was said before. " * number for number in range(8))


def request_of(chance: random.Random) -> dict[str, Any]:
    """A request of any length and kind; one in three begins as others do."""
    words = " ".join(str(chance.randrange(1000)) for _ in range(chance.choice((1, 5, 20, 60))))
    text = chance.choice(PREFIXES) + words if chance.random() < 0.33 else words
    prompt = {"prompt": text} if chance.random() < 0.7 else {"messages": [{"role": "user", "content": text}]}
    how = {"temperature": 0} if chance.random() < 0.5 else {"seed": chance.randrange(10**6), "top_p": 0.9}
    size = {"max_tokens": chance.choice((1, 4, 16, 40, 80)), "ignore_eos": True, "return_token_ids": True}
    more: dict[str, Any] = {"logprobs": 3 if "prompt" in prompt else True} if chance.random() < 0.2 else {}
    return {**prompt, **how, **size, **more, "n": chance.choice((1, 1, 1, 2))}


async def whole(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> None:
    """A plain answer, which must have all its tokens."""
    answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [body["max_tokens"]] * body[
        "n"
    ]


async def streamed(
    http: httpx.AsyncClient, route: str, body: dict[str, Any], leave_after: int | None
) -> None:
    """A stream, which must be complete unless the client leaves after so many events."""
    tokens = events = 0
    async with http.stream("POST", route, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                assert tokens == body["max_tokens"] * body["n"]
                return
            if line:
                tokens += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
                events += 1
            if events == leave_after:
                return
    raise EOFError("the stream ended early")


async def one(http: httpx.AsyncClient, chance: random.Random) -> None:
    """One request of any kind, from a client that may leave."""
    body, way = request_of(chance), chance.random()
    route = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    if way < 0.15:
        body["max_tokens"] = 400
        await streamed(http, route, body, chance.randint(1, 12))
    elif way < 0.6:
        await streamed(http, route, body, None)
    elif way < 0.97:
        await whole(http, route, body)
    else:
        assert (await http.post(route, json={**body, "top_p": 7})).status_code == 400


async def many(url: str, count: int, seed: int) -> None:
    """So many requests, a number of them at a time."""
    chances = iter([random.Random(f"{seed} {number}") for number in range(count)])
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S, limits=limits) as http:

        async def client() -> None:
            for chance in chances:
                await one(http, chance)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))


def sockets(server: Process) -> int:
    """How many sockets it has open."""
    return sum(name.startswith("socket:") for name in server.descriptors)


def until_quiet(url: str, server: Process, idle_sockets: int) -> None:
    """Until nothing runs, every page is back, and the sockets of all clients are closed."""

    def idle() -> bool:
        said = httpx.get(f"{url}/health", timeout=WITHIN_S).json()
        free = bool(said["kv_blocks_free"] == said["kv_blocks_total"])
        return free and (said["status"], said["running"], said["waiting"]) == ("ok", 0, 0)

    until(idle, "an engine without requests, and with all its pages")
    until(lambda: sockets(server) == idle_sockets, "a server without clients")


def weight_of(process: Process) -> dict[str, int]:
    """What a process holds: descriptors, threads, resident memory."""
    return {
        "descriptors": len(process.descriptors),
        "threads": process.status("Threads"),
        "resident_kb": process.status("VmRSS"),
    }


def serve_many(started: subprocess.Popen[str]) -> tuple[list[dict[str, int]], list[dict[str, int]], str]:
    """What the server and its ranks hold after the warm-up and at the end, and the metrics at the end."""
    url, server = url_of(started), process_of(started)
    processes, idle_sockets = [server, *ranks_of(started)], sockets(server)
    asyncio.run(many(url, WARM_UP, seed=0))
    until_quiet(url, server, idle_sockets)
    before = [weight_of(process) for process in processes]
    asyncio.run(many(url, REQUESTS, seed=1))
    until_quiet(url, server, idle_sockets)
    return before, [weight_of(process) for process in processes], httpx.get(f"{url}/metrics").text


@pytest.mark.soak
def test_two_thousand_requests_leave_nothing_behind(models: Models) -> None:
    arguments = ["--tp", "2", "--port", "0", "--kv-mb", str(KV_MB)]
    with program(str(models.directory(mtp=True)), *arguments) as started:
        before, after, metrics = serve_many(started)
        started.terminate()
        assert ended(started) == (0, "")
    figures = f"before {before}\nafter {after}\n{metrics}"
    counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(counts['liveweight_engine_requests_finished_total{reason="abort"}']) > REQUESTS / 20
    assert float(counts["liveweight_engine_cached_tokens_total"]) > 0
    assert float(counts["liveweight_engine_preemptions_total"]) > 0
    assert float(counts["liveweight_engine_drafted_tokens_total"]) > 0
    for old, new in zip(before, after, strict=True):
        assert new["descriptors"] <= old["descriptors"], figures
        assert new["threads"] <= old["threads"], figures
        assert new["resident_kb"] <= old["resident_kb"] + GROWTH_KB, figures
