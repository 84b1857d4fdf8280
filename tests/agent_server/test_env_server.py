"""Every row and rule of the env server, over a real socket."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
from agentrl.agent_server.env_service import EnvLimits

from agentrl.errors import BusyError

from .serving import Caller, Counting, Pictures, Stream, serving, until


@pytest.fixture
async def server() -> AsyncIterator[Caller]:
    async with serving() as caller:
        yield caller


def kind(answer: tuple[int, Any]) -> tuple[int, str]:
    status, reply = answer
    return status, reply["error"]["class"]


async def test_what_is_offered(server: Caller) -> None:
    status, reply = await server.call("GET", "/v1/envs")
    assert status == 200
    counting, pictures = reply["envs"]
    assert counting == {
        "name": "counting",
        "description": "Counts its steps, and on which thread each call ran.",
        "tools": [],
        "max_turns": 5,
        "splits": ["train", "test"],
        "task_counts": {"train": 7, "test": 2},
    }
    assert (pictures["name"], pictures["splits"]) == ("pictures", [])
    status, page = await server.call("GET", "/v1/envs/counting/tasks?split=train&offset=5&limit=3")
    assert [task["id"] for task in page["tasks"]] == ["train-5", "train-6"]
    assert page["tasks"][0] == {"id": "train-5", "prompt": "prompt 5", "label": {"n": 5}, "images": [], "row": {}}
    assert (page["offset"], page["total"]) == (5, 7)
    assert kind(await server.call("GET", "/v1/envs/none/tasks")) == (404, "UnknownEnv")
    for query in ("offset=-1", "limit=0", "limit=9999", "offset=x", f"split={'x' * 200}"):
        assert kind(await server.call("GET", f"/v1/envs/counting/tasks?{query}")) == (422, "Invalid")


async def test_a_stream_of_tasks_is_read_page_by_page(server: Caller) -> None:
    for offset in (0, 3, 3, 6, 0, 50):
        status, page = await server.call("GET", f"/v1/envs/counting/tasks?split=stream&offset={offset}&limit=3")
        assert (status, page["total"]) == (200, None)
        assert [task["id"] for task in page["tasks"]] == [f"s-{offset + i}" for i in range(3)]
    path = "/v1/envs/counting/tasks?split=stream&offset=9007199254740991"
    assert kind(await server.call("GET", path)) == (422, "DataError")
    assert kind(await server.call("GET", "/v1/envs/counting/tasks?split=none")) == (404, "UnknownSplit")


async def test_an_episode(server: Caller) -> None:
    task = {"id": "mine", "label": 2**55 + 1}
    opened = await server.open(task=task, seed=3, options={"max_turns": 4})
    assert opened["observation"] == f"mine {2**55 + 1} 3"
    assert (opened["info"], opened["lease_s"]) == ({"score": 0.5}, 600.0)
    assert "task" not in opened
    session = opened["session_id"]
    env = Counting.made[-1]
    assert env.reset_options is not None
    assert (env.reset_options["max_turns"], env.reset_options["task"].label) == (4, 2**55 + 1)
    status, reply = await server.step(session, 0, "hello")
    assert status == 200
    assert reply == {
        "index": 0,
        "observation": "step 1: hello",
        "reward": 0.25,
        "terminated": False,
        "truncated": False,
        "info": {"metrics": {"seen": [0, 1]}, "text": "hello"},
    }
    assert (await server.call("POST", f"/v1/sessions/{session}/heartbeat")) == (200, {"lease_s": 600.0})
    assert (await server.call("DELETE", f"/v1/sessions/{session}"))[0] == 200
    assert env.closed == 1
    assert len(env.threads) == 1, "constructor, reset, step and close run on one thread"
    assert kind(await server.step(session, 1)) == (404, "UnknownSession")
    assert kind(await server.call("DELETE", f"/v1/sessions/{session}")) == (404, "UnknownSession")


async def test_no_verdict_is_null(server: Caller) -> None:
    session = (await server.open())["session_id"]
    for index, action in enumerate(("nan", "inf", "none", "text")):
        assert (await server.step(session, index, action))[1]["reward"] is None


async def test_an_action_may_be_an_object(server: Caller) -> None:
    session = (await server.open())["session_id"]
    call = {"id": "c", "name": "f", "arguments": {"x": 1}}
    action = {"text": "words", "tool_calls": [call], "finish_reason": "length"}
    status, reply = await server.step(session, 0, action)
    assert (status, reply["info"]["text"]) == (200, "words")
    assert kind(await server.step(session, 1, {"tool_calls": [{"id": "no name"}]})) == (422, "DataError")
    assert (await server.step(session, 1, "still its turn"))[0] == 200


async def test_a_repeat_is_answered_from_the_record(server: Caller) -> None:
    session = (await server.open())["session_id"]
    first = await server.step(session, 0)
    assert await server.step(session, 0) == first
    assert kind(await server.step(session, 0, "other")) == (409, "Conflict")
    assert kind(await server.step(session, 2)) == (409, "Conflict")
    for index in range(1, 5):
        last = await server.step(session, index)
    assert last[1]["terminated"]
    assert await server.step(session, 4) == last
    assert kind(await server.step(session, 0)) == (409, "Conflict")
    assert kind(await server.step(session, 5)) == (409, "Conflict")
    assert Counting.made[-1].steps == 5


async def test_a_repeat_may_be_spelled_otherwise_but_1_is_not_true(server: Caller) -> None:
    session = (await server.open())["session_id"]

    def calling(arguments: Any) -> Any:
        return {"text": "", "tool_calls": [{"id": "c", "name": "f", "arguments": arguments}]}

    first = await server.step(session, 0, "x")
    for same in ({"text": "x"}, {"text": "x", "tool_calls": [], "finish_reason": "stop"}):
        assert await server.step(session, 0, same) == first
    assert kind(await server.step(session, 0, {"text": "x", "finish_reason": "length"})) == (409, "Conflict")
    second = await server.step(session, 1, calling({"a": 1, "b": [2]}))
    assert await server.step(session, 1, calling({"b": [2], "a": 1})) == second
    for other in ({"a": True, "b": [2]}, {"a": 1, "b": [2.5]}, {"a": 1}):
        assert kind(await server.step(session, 1, calling(other))) == (409, "Conflict")


async def test_a_repeat_waits_for_the_first(server: Caller) -> None:
    session = (await server.open())["session_id"]
    slow = [asyncio.ensure_future(server.step(session, 0, "slow")) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert kind(await server.step(session, 0, "fast")) == (409, "Conflict")
    assert kind(await server.step(session, 1, "next")) == (409, "Conflict")
    answers = await asyncio.gather(*slow)
    assert answers[0] == answers[1] == answers[2]
    assert Counting.made[-1].steps == 1


async def test_a_step_goes_on_when_its_caller_goes_away(server: Caller) -> None:
    session = (await server.open())["session_id"]
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(server.step(session, 0, "slow"), 0.1)
    assert (await server.step(session, 0, "slow"))[1]["observation"] == "step 1: slow"


async def test_what_the_env_raises_is_recorded_too(server: Caller) -> None:
    session = (await server.open())["session_id"]
    for _ in range(2):
        status, reply = await server.step(session, 0, "raise")
        assert (status, reply["error"]["class"], reply["error"]["retryable"]) == (500, "EnvError", False)
        assert "broken on purpose" in reply["error"]["message"]
    assert kind(await server.step(session, 1)) == (409, "Conflict")
    async with server.http.get("/metrics") as metrics:
        assert 'agentrl_env_errors_total{class="EnvError",env="counting"} 1.0' in await metrics.text()


async def test_a_key_opens_one_session(server: Caller) -> None:
    made = len(Counting.made)
    body = {"env": "counting", "seed": 1, "idempotency_key": "k"}
    answers = await asyncio.gather(*(server.call("POST", "/v1/sessions", body) for _ in range(4)))
    assert len({reply["session_id"] for _, reply in answers}) == 1
    assert len(Counting.made) == made + 1
    assert kind(await server.call("POST", "/v1/sessions", {**body, "seed": 2})) == (409, "Conflict")
    await server.call("DELETE", f"/v1/sessions/{answers[0][1]['session_id']}")
    assert (await server.call("POST", "/v1/sessions", body))[1]["session_id"] != answers[0][1]["session_id"]


async def test_a_session_whose_answer_never_came_is_closed_by_its_key() -> None:
    class Slow(Counting):
        """Whose reset takes a while."""

        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
            if seed:
                await asyncio.sleep(30)
            return "", {"raw": b"\xff"}

    async with serving(EnvLimits(sessions=1), envs={"slow": Slow}) as server:
        body = {"env": "slow", "seed": 0, "idempotency_key": "k"}
        assert (await server.call("POST", "/v1/sessions", body))[1]["info"] == {"raw": "\ufffd"}
        assert (await server.call("DELETE", "/v1/sessions/k"))[0] == 200
        assert kind(await server.call("DELETE", "/v1/sessions/k")) == (404, "UnknownSession")
        opening = asyncio.ensure_future(server.call("POST", "/v1/sessions", {**body, "seed": 1}))
        await until(lambda: len(Counting.made) == 3)
        assert (await server.call("DELETE", "/v1/sessions/k"))[0] == 200
        assert kind(await opening) == (404, "UnknownSession")
        await until(lambda: [env.closed for env in Counting.made] == [1, 1, 1])
        assert (await server.call("POST", "/v1/sessions", body))[0] == 200


async def test_a_slow_call_of_tasks_is_504_and_hinders_no_other_split() -> None:
    class Late(Counting):
        """Whose other splits come at the second try."""

        waited = False

        @classmethod
        def tasks(cls, split: str = "train") -> Any:
            if split == "late" and not cls.waited:
                cls.waited = True
                time.sleep(0.6)
            return super().tasks("train")

    async with serving(EnvLimits(call_timeout_s=0.3), envs={"late": Late}) as server:
        status, reply = await server.call("GET", "/v1/envs/late/tasks?split=late")
        assert (status, reply["error"]["class"], reply["error"]["retryable"]) == (504, "EnvError", True)
        assert (await server.call("GET", "/v1/envs/late/tasks?split=train"))[0] == 200
        await asyncio.sleep(0.3)
        status, page = await server.call("GET", "/v1/envs/late/tasks?split=late")
        assert (status, page["total"]) == (200, 7)


async def test_without_a_task_the_env_draws_one(server: Caller) -> None:
    drawn = [(await server.open(seed=seed))["task"]["id"] for seed in (5, 5, 6, 7, 8)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


async def test_requests_that_do_not_fit(server: Caller) -> None:
    bad: list[Any] = [
        {},
        {"env": "counting", "seed": -1},
        {"env": "counting", "seed": 2**70},
        {"env": "counting", "task": {"prompt": "no id"}},
        {"env": "counting", "options": []},
        [],
        "text",
    ]
    for body in bad:
        assert kind(await server.call("POST", "/v1/sessions", body)) == (422, "Invalid")
    path = {"id": "t", "prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/x"}}]}]}
    for task in (path, {"id": "t", "images": [{"type": "image", "image": "/etc/x"}]}):
        assert kind(await server.call("POST", "/v1/sessions", {"env": "counting", "task": task})) == (422, "DataError")
    assert kind(await server.call("POST", "/v1/sessions", {"env": "none"})) == (404, "UnknownEnv")
    assert kind(await server.call("POST", "/v1/sessions", {"env": "counting", "options": {"task": 1}}))[0] == 422


async def test_a_full_server_says_when_to_come_back() -> None:
    async with serving(EnvLimits(sessions=2)) as server:
        sessions = [(await server.open())["session_id"] for _ in range(2)]
        async with server.http.post("/v1/sessions", json={"env": "counting"}) as refused:
            assert refused.status == 429
            assert int(refused.headers["Retry-After"]) >= 1
            assert (await refused.json())["error"]["retryable"]
        await server.call("DELETE", f"/v1/sessions/{sessions[0]}")
        await server.open()


async def test_an_env_without_a_free_place_is_full_too() -> None:
    class Crowded(Counting):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            if seed:
                raise BusyError("no browser is free")
            return super().reset(seed=seed, options=options)

    async with serving(envs={"crowded": Crowded}) as server:
        asked = {"env": "crowded", "seed": 1, "idempotency_key": "k"}
        for _ in range(2):
            async with server.http.post("/v1/sessions", json=asked) as refused:
                assert refused.status == 429 and "Retry-After" in refused.headers
        await server.open("crowded")


async def test_a_lease_runs_out_but_not_during_a_call() -> None:
    async with serving(EnvLimits(sessions=1, lease_s=0.2)) as server:
        session = (await server.open())["session_id"]
        env = Counting.made[-1]
        assert (await server.step(session, 0, "slow"))[0] == 200
        await until(lambda: env.closed)
        assert env.closed == 1
        assert kind(await server.step(session, 1)) == (404, "UnknownSession")
        await server.open()


async def test_heartbeats_and_repeats_keep_a_session() -> None:
    async with serving(EnvLimits(lease_s=0.4)) as server:
        beaten, repeated = [(await server.open())["session_id"] for _ in range(2)]
        for _ in range(8):
            await asyncio.sleep(0.1)
            assert (await server.call("POST", f"/v1/sessions/{beaten}/heartbeat"))[0] == 200
            assert (await server.step(repeated, 0))[0] == 200
        assert (await server.step(beaten, 0))[0] == 200


async def test_a_call_that_hangs_fails_its_session_and_keeps_its_slot() -> None:
    async with serving(EnvLimits(sessions=1, call_timeout_s=0.4)) as server:
        session = (await server.open())["session_id"]
        env = Counting.made[-1]
        status, reply = await server.step(session, 0, "hang")
        assert (status, reply["error"]["class"], reply["error"]["retryable"]) == (504, "EnvError", False)
        await server.call("DELETE", f"/v1/sessions/{session}")
        assert kind(await server.call("POST", "/v1/sessions", {"env": "counting"})) == (429, "Full")
        await until(lambda: env.closed)
        await server.open()


async def test_the_end_of_the_server_closes_every_env() -> None:
    async with serving() as server:
        for _ in range(3):
            await server.open()
        envs = Counting.made[-3:]
    assert [env.closed for env in envs] == [1, 1, 1]


async def test_an_image_is_sent_once_a_session(server: Caller) -> None:
    opened = await server.open("pictures")
    first, text = opened["observation"]
    assert text == {"type": "text", "text": "look"}
    png = base64.b64decode(first["data"])
    assert png.startswith(b"\x89PNG")
    _, reply = await server.step(opened["session_id"], 0)
    again, new = reply["observation"]
    assert again == {"type": "image", "sha256": first["sha256"]}
    assert "data" in new
    async with server.http.get(f"/v1/images/{first['sha256']}") as image:
        assert (image.content_type, await image.read()) == ("image/png", png)
    assert "data" in (await server.open("pictures"))["observation"][0]
    for unknown in ("0" * 64, "..%2f..%2fetc", "x"):
        async with server.http.get(f"/v1/images/{unknown}") as image:
            assert image.status == 404


async def test_the_stream_has_the_same_calls(server: Caller) -> None:
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        assert [env["name"] for env in (await stream.ask("envs"))["envs"]] == ["counting", "pictures"]
        page = await stream.ask("tasks", env="counting", split="test")
        assert [task["id"] for task in page["tasks"]] == ["test-0", "test-1"]
        opened = await stream.ask("create", env="counting", seed=0, task={"id": "t"})
        assert (opened["id"], opened["status"], opened["observation"]) == (3, 200, "t None 0")
        session = opened["session_id"]
        first = await stream.ask("step", session_id=session, index=0, action="a")
        assert first["observation"] == "step 1: a"
        assert {**await stream.ask("step", session_id=session, index=0, action="a"), "id": 4} == first
        assert (await stream.ask("step", session_id=session, index=9, action="a"))["status"] == 409
        assert (await stream.ask("heartbeat", session_id=session))["lease_s"] == 600.0
        assert (await stream.ask("close", session_id=session))["status"] == 200
        assert (await stream.ask("step", session_id=session, index=1, action="a"))["status"] == 404
        shown = (await stream.ask("create", env="pictures"))["observation"][0]
        assert (await stream.ask("image", sha256=shown["sha256"]))["data"] == shown["data"]


async def test_calls_on_the_stream_run_at_once_and_outlive_it(server: Caller) -> None:
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        slow, fast = [(await stream.ask("create", env="counting"))["session_id"] for _ in range(2)]
        first = await stream.send("step", session_id=slow, index=0, action="slow")
        second = await stream.send("step", session_id=fast, index=0, action="fast")
        assert [(await stream.receive())["id"] for _ in range(2)] == [second, first]
        await stream.send("step", session_id=slow, index=1, action="slow")
        await asyncio.sleep(0.1)
    assert (await server.step(slow, 1, "slow"))[1]["observation"] == "step 2: slow"


async def test_what_is_no_call_is_answered_and_the_stream_goes_on(server: Caller) -> None:
    bad = ["", "{", "[]", "7", '{"id": []}', '{"id": 1}', '{"id": 1, "call": "none"}', '{"id": 1, "call": ["step"]}']
    bad += ['{"id": 1, "call": "step"}', '{"id": 1, "call": "step", "session_id": "x", "index": 0, "action": 7}']
    bad += ['{"id": 1, "call": "image", "sha256": 3}', '{"id": 1, "call": "heartbeat", "session_id": {}}']
    bad += [
        '{"id": 1, "call": "create"}',
        "[" * 100_000,
        '{"id": 1, "call": "tasks", "env": "counting", "limit": 1e99}',
    ]
    async with server.http.ws_connect("/v1/stream") as socket:
        stream = Stream(socket)
        for message in bad:
            await socket.send_str(message)
            reply = await stream.receive()
            assert 400 <= reply["status"] < 500, (message, reply)
            assert reply["error"]["message"]
        assert (await stream.ask("envs"))["status"] == 200


async def test_who_reads_no_answer_is_not_listened_to() -> None:
    """One step, repeated: its answers are larger than what was asked, by far."""
    repeats, big = 400, 400_000
    before = len(asyncio.all_tasks())

    class Wordy(Counting):
        """Says much."""

        def step(self, action: Any) -> Any:
            return "y" * big, 1.0, False, False, {}

    async with serving(envs={"wordy": Wordy}) as server:
        for leaves in (False, True):
            socket = await server.http.ws_connect("/v1/stream", max_msg_size=0)
            stream = Stream(socket)
            session = (await stream.ask("create", env="wordy"))["session_id"]
            held = psutil.Process().memory_info().rss
            assert socket._response.connection is not None
            transport: Any = socket._response.connection.transport
            transport.pause_reading()
            for _ in range(repeats):
                await stream.send("step", session_id=session, index=0, action="a")
            await asyncio.sleep(0.5)
            assert psutil.Process().memory_info().rss - held < 75 * 2**20 < repeats * big / 2
            if leaves:
                transport.abort()
            else:
                transport.resume_reading()
                assert {(await stream.receive())["status"] for _ in range(repeats)} == {200}
            await socket.close()
        assert (await server.call("GET", "/v1/envs"))[0] == 200
    await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_every_env_is_looked_at_before_the_server_is_up() -> None:
    class Broken(Pictures):
        def __init__(self) -> None:
            raise ValueError("no display")

    with pytest.raises(Exception, match="did not start"):
        async with serving(envs={"broken": Broken}):
            pass


async def test_openapi_describes_the_bodies(server: Caller) -> None:
    document = (await server.call("GET", "/openapi.json"))[1]
    step = document["paths"]["/v1/sessions/{session_id}/step"]["post"]
    assert step["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/StepRequest"}
    assert {"StepRequest", "OpenSession", "TaskForm", "ActionForm", "SessionReply"} <= set(
        document["components"]["schemas"]
    )
