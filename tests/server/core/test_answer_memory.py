"""The memory of answers: taken before a byte is made, within one budget, given back once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from server import answer_memory, memory_budget, request_pacing
from server.answer_memory import (
    ABORT,
    PIECE,
    PIECES,
    Answer,
    AnswerMemoryMiddleware,
    Answers,
    Damaged,
    in_pieces,
)
from server.app import UncaughtErrors
from server.http_protocol import HttpProtocol
from server.memory_budget import Reservation
from server.problems import ProblemError
from server.request_pacing import RequestPacing
from server.routes import files
from server.telemetry import Telemetry
from stepwell import Client
from stepwell.codec import encode
from stepwell.testing import make_spec, make_trajectory, wait_until

MB = 1 << 20
SPEC = make_spec(observation=3, action=2)


class Asking:
    """One request to an answer, whose client reads when it is told to."""

    def __init__(
        self,
        answers: Answers,
        size: int = 0,
        parts: Any = None,
        threads: int = answer_memory.COMPUTE,
        **options: Any,
    ):
        self.reads = asyncio.Event()
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        made = parts or (lambda: iter([bytes(PIECE)] * 3))
        answer = Answer(answers, size, made, media_type="a/b", **options)
        answer.threads = threads
        scope = {"type": "http", "method": "GET", ABORT: self.gone.set}
        self.task = asyncio.create_task(answer(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        if message.get("body"):
            await self.reads.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "WAIT", 0.5)
    monkeypatch.setattr(memory_budget, "ROOM", 0.01)
    monkeypatch.setattr(answer_memory, "STALLED", 0.05)


def test_pieces_are_all_bytes_in_order_however_they_come() -> None:
    rng = random.Random(3)
    for _ in range(50):
        sizes = [rng.choice([0, 1, 7, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE]) for _ in range(6)]
        parts = [rng.randbytes(size) for size in sizes]
        pieces = list(in_pieces(lambda: parts))  # noqa: B023
        assert b"".join(pieces) == b"".join(parts)
        assert all(len(piece) == PIECE for piece in pieces[:-1])
        assert all(0 < len(piece) <= PIECE for piece in pieces)


def test_an_answer_holds_its_size_while_it_is_sent_and_one_piece_ahead() -> None:
    async def run() -> None:
        answers = Answers(80 * MB, Telemetry())
        made = 0

        def parts() -> Iterator[bytes]:
            nonlocal made
            for _ in range(100):
                made += 1
                yield bytes(PIECE)

        client = Asking(answers, 5 * MB, parts)
        await until(lambda: len(client.sent) == 2)
        assert answers.budget.held == 5 * MB + PIECES and made <= 2
        client.reads.set()
        await client.task
        assert len(client.body) == 100 * PIECE and answers.budget.held == 0
        assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(run())


@pytest.mark.parametrize("threads", [answer_memory.COMPUTE, answer_memory.READ])
def test_pieces_are_made_outside_of_the_event_loop_in_few_threads(threads: int) -> None:
    seen: set[int] = set()
    busy = most = 0

    def parts() -> Iterator[bytes]:
        nonlocal busy, most
        for _ in range(20):
            busy += 1
            most = max(most, busy)
            seen.add(threading.get_ident())
            hashlib.sha256(bytes(1 << 20))  # releases the interpreter: others could begin
            busy -= 1
            yield bytes(PIECE)

    async def run() -> None:
        answers = Answers(80 * MB, Telemetry())
        clients = [Asking(answers, 0, parts, threads=threads) for _ in range(20)]
        for client in clients:
            client.reads.set()
        await asyncio.gather(*(client.task for client in clients))
        assert threading.get_ident() not in seen
        assert most <= threads and answers.budget.held == 0

    asyncio.run(run())


def test_a_small_answer_waits_once_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def run() -> None:
        answers = Answers(80 * MB, Telemetry())
        in_thread = answers.in_thread

        async def counted(*args: Any) -> Any:
            nonlocal turns
            turns += 1
            return await in_thread(*args)

        monkeypatch.setattr(answers, "in_thread", counted)
        closed = threading.Event()

        def parts() -> Iterator[bytes]:
            try:
                yield from (b"a", b"b")
            finally:
                closed.set()

        client = Asking(answers, 0, parts)
        client.reads.set()
        await client.task
        assert client.body == b"ab" and closed.is_set()

    asyncio.run(run())
    assert turns == 1


def test_a_client_that_does_not_read_loses_its_place_when_others_wait(short_waits: None) -> None:
    async def run() -> None:
        telemetry = Telemetry()
        answers = Answers(80 * MB, telemetry)
        deaf = [Asking(answers, 20 * MB) for _ in range(3)]
        await until(lambda: all(len(client.sent) == 2 for client in deaf))
        assert not any(client.gone.is_set() for client in deaf), "while nobody waits"
        other = Asking(answers, 20 * MB)
        other.reads.set()
        await other.task
        assert len(other.body) == 3 * PIECE
        dropped = [client for client in deaf if client.gone.is_set()]
        assert len(dropped) == 1, "no more than are needed"
        await dropped[0].task
        assert telemetry.answers_dropped._value.get() == 1
        for client in deaf:
            client.reads.set()
        await asyncio.gather(*(client.task for client in deaf))
        assert answers.budget.held == 0

    asyncio.run(run())


def test_a_client_that_reads_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch, short_waits: None
) -> None:
    """However long the service needs for a piece: then others are told to come again."""
    monkeypatch.setattr(memory_budget, "WAIT", 0.2)
    go_on = threading.Event()

    def slow() -> Iterator[bytes]:
        yield bytes(PIECE)
        go_on.wait(240)
        yield bytes(PIECE)

    async def run() -> None:
        answers = Answers(80 * MB, Telemetry())
        client = Asking(answers, 60 * MB, slow)
        client.reads.set()
        await until(lambda: len(client.sent) == 2)
        with pytest.raises(ProblemError) as caught:
            await Asking(answers, 60 * MB).task
        assert (caught.value.status, caught.value.code) == (429, "too_busy")
        assert "STEPWELL_ANSWER_MEMORY" in caught.value.detail
        assert caught.value.headers["Retry-After"] == "1"
        assert not client.gone.is_set()
        go_on.set()
        await client.task
        assert len(client.body) == 2 * PIECE and answers.budget.held == 0

    asyncio.run(run())


def breaking(error: Exception, after: int) -> Callable[[], Iterator[bytes]]:
    def parts() -> Iterator[bytes]:
        for _ in range(after):
            yield bytes(PIECE)
        raise error

    return parts


def gone_file() -> ProblemError:
    return ProblemError(410, "damaged", "it is damaged")


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("error", [Damaged("x"), ZeroDivisionError("x"), OSError(5, "EIO")])
def test_what_fails_gives_its_memory_back_and_never_looks_complete(
    error: Exception, after: int
) -> None:
    async def run() -> None:
        answers = Answers(80 * MB, Telemetry())
        client = Asking(answers, MB, breaking(error, after), damaged=gone_file)
        client.reads.set()
        (raised,) = await asyncio.gather(client.task, return_exceptions=True)
        assert answers.budget.held == 0
        if after:
            assert client.gone.is_set() and client.sent[-1]["more_body"]
            assert raised is None if isinstance(error, Damaged) else raised is not None
        else:
            assert not client.sent
            expected = ProblemError if isinstance(error, Damaged) else type(error)
            assert isinstance(raised, expected)

    asyncio.run(run())


def test_a_client_that_goes_away_releases_its_place_and_the_file() -> None:
    closed = threading.Event()

    def parts() -> Iterator[bytes]:
        try:
            while True:
                yield bytes(PIECE)
        finally:
            closed.set()

    async def run() -> None:
        answers = Answers(80 * MB, Telemetry())
        client = Asking(answers, MB, parts)
        await until(lambda: len(client.sent) == 2)
        client.gone.set()
        await client.task
        assert closed.is_set() and answers.budget.held == 0
        cancelled = Asking(answers, MB, parts)
        await until(lambda: len(cancelled.sent) == 2)
        cancelled.task.cancel()
        await asyncio.gather(cancelled.task, return_exceptions=True)
        assert answers.budget.held == 0 and not answers._places

    asyncio.run(run())


@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
def test_a_whole_body_is_sent_in_pieces_and_holds_its_length(size: int) -> None:
    body = random.Random(size).randbytes(size)
    held: list[int] = []
    sent: list[dict[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def run() -> None:
        answers = Answers(80 * MB, Telemetry())

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            held.append(answers.budget.held)

        service = type("Service", (), {"answers": answers})
        state = type("State", (), {"service": service})
        scope = {"type": "http", "app": type("App", (), {"state": state})}
        await AnswerMemoryMiddleware(app)(scope, None, send)  # type: ignore[arg-type]
        assert answers.budget.held == 0
        assert max(held) == (size if size > PIECE else 0)

    asyncio.run(run())
    assert sent[0]["status"] == 200
    assert b"".join(message["body"] for message in sent[1:]) == body
    assert all(len(message["body"]) <= PIECE for message in sent[1:])
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [
        False
    ]


# --- over HTTP ------------------------------------------------------------------------------------


def full(live: Any) -> Reservation:
    reservation = Reservation(live.service.answers.budget)
    reservation.add(live.service.answers.budget.total)
    return reservation


def stored(live: Any) -> tuple[dict[str, str], bytes]:
    """Paths of every answer that is made in pieces, and the bytes of a policy."""
    live.run()
    data = random.Random(4).randbytes(3 * MB)
    live.publish(1, data)
    live.create()
    t = make_trajectory(SPEC, length=30)
    live.post([t])
    live.flush()
    (shard,) = {info["shard"] for info in live.listing()}
    video = live.evaluate()
    live.put_video(video, b"GIF89a" + bytes(1000))
    return {
        "policy": "/v1/runs/r/policies/1",
        "shard": f"/v1/shards/{shard}",
        "video": video,
        "steps": f"/v1/trajectories/{t.id}/steps",
        "metrics": "/v1/runs/r/metrics",
    }, data


def test_every_answer_in_pieces_waits_for_memory_and_is_told_to_come_again(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "WAIT", 0.05)
    paths, _ = stored(live)
    everything = full(live)
    for path in paths.values():
        answer = live.http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (429, "too_busy"), path
        assert answer.headers["retry-after"] == "1"
    for name in ("policy", "shard", "video"):  # nothing to send, nothing to hold
        head = live.http.head(paths[name])
        assert head.status_code == 200 and int(head.headers["content-length"])
        known = {"if-none-match": head.headers["etag"]}
        assert live.http.get(paths[name], headers=known).status_code == 304
    assert live.http.get("/v1/datasets/d").status_code == 200, "a small answer needs no place"
    everything.release()
    for path in paths.values():
        assert live.http.get(path).status_code == 200
    assert live.service.answers.budget.held == 0


def test_ranges_of_many_pieces(live: Any) -> None:
    paths, data = stored(live)
    for first, last in ((0, 0), (5, 3 * MB - 1), (PIECE - 1, PIECE), (MB - 7, 2 * MB + 9)):
        answer = live.http.get(paths["policy"], headers={"range": f"bytes={first}-{last}"})
        assert answer.status_code == 206 and answer.content == data[first : last + 1]
        assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(data)}"
    assert live.http.get(paths["policy"]).content == data


def test_damage_behind_the_first_part_ends_the_connection(live: Any) -> None:
    paths, data = stored(live)
    (file,) = (live.data / "policies").iterdir()
    content = bytearray(data)
    content[files.AHEAD + 5 * PIECE] ^= 1
    file.write_bytes(content)
    answer = live.http.get(paths["policy"])
    assert len(answer.content) < len(data) and data.startswith(answer.content)
    assert file.name in live.http.get("/readyz").json()["detail"]
    assert live.service.answers.budget.held == 0


def test_an_encoder_that_fails_half_way_is_logged_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """By the service, and not again by the server below it; the client sees a broken answer."""

    async def run() -> bytes:
        answers = Answers(80 * MB, Telemetry())

        async def app(scope: Any, receive: Any, send: Any) -> None:
            broken = breaking(ZeroDivisionError("half way"), 2)
            answer = Answer(answers, 0, broken, media_type="a/b")
            await UncaughtErrors(answer)(scope, receive, send)

        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := await reader.read(1 << 16):
                received += chunk
        writer.close()
        await until(lambda: answers.budget.held == 0)
        server.should_exit = True
        await serving
        return received

    received = asyncio.run(run())
    assert received.startswith(b"HTTP/1.1 200") and not received.endswith(b"0\r\n\r\n")
    said = capsys.readouterr()
    assert (said.out + said.err).count("ZeroDivisionError: half way") == 1
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def test_the_client_comes_again_after_a_429(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "WAIT", 0.05)
    live = start()
    live.create()
    t = make_trajectory(SPEC, length=30)
    live.post([t])
    everything = full(live)
    timer = threading.Timer(0.3, everything.release)
    timer.start()
    transport = live.http._transport
    with Client("http://127.0.0.1:8000", transport=transport) as client:
        assert client.steps(t.id).digest == t.digest
    timer.join()
    assert encode([t], SPEC) == live.http.get(f"/v1/trajectories/{t.id}/steps").content


def test_sockets_that_are_not_read_hold_little_and_lose_it(
    start_service: Callable[..., Any],
) -> None:
    """A budget for three answers: whoever reads is served, though six do not."""
    service = start_service(
        env={"STEPWELL_ANSWER_MEMORY": str(3 * PIECES + MB // 4), "STEPWELL_SQL_WORKERS": "1"}
    )
    data = random.Random(1).randbytes(40 * MB)
    with service.client(retry_for=120) as client:
        client.create_run("r", "train")
        client.publish_policy("r", 1, data)
        request = b"GET /v1/runs/r/policies/1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        held = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(6)]
        try:
            for one in held:
                one.sendall(request)
            wait_until(
                lambda: "stepwell_answer_waiting 3.0" in client.call("GET", "/metrics").text,
                what="three that wait",
            )
            found = client.download_policy("r", 1)
            assert found is not None and found.data == data
        finally:
            for one in held:
                one.close()
        wait_until(
            lambda: "stepwell_answer_held_bytes 0.0" in client.call("GET", "/metrics").text,
            what="the memory given back",
        )


def test_a_page_of_long_rows_ends_early_and_all_pages_hold_every_row(live: Any) -> None:
    for number in range(9):
        body = {"name": f"r{number}", "kind": "train", "config": {"text": "x" * MB}}
        assert live.http.post("/v1/runs", json=body).status_code == 201
    names, sizes, params = [], [], {"limit": 1000}
    while True:
        page = live.http.get("/v1/runs", params=params).json()
        assert page["total"] == 9
        sizes.append(len(page["items"]))
        names += [item["name"] for item in page["items"]]
        if page["next"] is None:
            break
        params["cursor"] = page["next"]
    assert names == [f"r{number}" for number in reversed(range(9))]
    assert sizes == [4, 4, 1]
    brief = live.http.get("/v1/runs", params={"limit": 1000, "brief": True}).json()
    assert len(brief["items"]) == 9 and brief["next"] is None


def test_many_requests_at_once_start_in_order_a_few_in_each_round() -> None:
    begun: list[int] = []
    rounds = 0
    in_round: list[int] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        begun.append(scope["number"])
        in_round.append(rounds)

    async def run() -> None:
        nonlocal rounds
        paced = RequestPacing(app)

        def scope(number: int, path: str = "/v1/runs") -> dict[str, Any]:
            return {"type": "http", "path": path, "number": number}

        tasks = [asyncio.create_task(paced(scope(n), None, None)) for n in range(100)]  # type: ignore[arg-type]
        tasks[50].cancel()
        await asyncio.sleep(0)
        await paced(scope(-1, "/healthz"), None, None)  # type: ignore[arg-type]
        assert begun[-1] == -1 and len(begun) <= request_pacing.STARTS + 1, "it does not queue"
        while not all(task.done() for task in tasks):
            rounds += 1
            await asyncio.sleep(0)
        await paced(scope(100), None, None)  # type: ignore[arg-type]

    asyncio.run(run())
    assert begun == [*range(8), -1, *(n for n in range(8, 101) if n != 50)]
    assert max(in_round.count(one) for one in range(1, rounds + 1)) <= 2 * request_pacing.STARTS
