"""Many people at once, and a service that restarts: nobody sees an exception, everybody's page
comes back by itself. Without a browser: each session speaks Streamlit's protocol."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Origin, Subprotocol

from stepwell import Client
from stepwell.messages import MetricPoint
from stepwell.testing import make_spec, make_trajectory

SESSIONS = int(os.environ.get("STEPWELL_SESSIONS", "12"))
"""`make faults` opens fifty."""
SECONDS = 280.0
PATHS = ("", "datasets", "trajectories", "runs", "workers")


class Session:
    """One browser tab: asks for a page, and refreshes the parts that say so."""

    def __init__(self, path: str):
        self.path = path
        self.exceptions: list[str] = []
        self.shown: set[str] = set()
        """Texts on the page."""
        self.drawn = asyncio.Event()
        self._refreshing: dict[str, asyncio.Task[None]] = {}

    async def live(self, url: str, stop: asyncio.Event) -> None:
        address = f"{url.replace('http', 'ws')}/_stcore/stream"
        async with connect(  # on a busy machine a ping's answer may take its time
            address,
            subprotocols=[Subprotocol("streamlit")],
            origin=Origin(url),
            max_size=None,
            ping_interval=None,
        ) as socket:
            await self._ask(socket)
            reading = asyncio.create_task(self._read(socket))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, stopped, *self._refreshing.values()):
                task.cancel()
            if not stop.is_set():
                reading.result()  # says why it ended

    async def _ask(self, socket: ClientConnection, fragment: str = "") -> None:
        message = BackMsg()
        message.rerun_script.page_name = self.path
        message.rerun_script.is_auto_rerun = bool(fragment)
        message.rerun_script.fragment_id = fragment
        await socket.send(message.SerializeToString())

    async def _refresh(self, socket: ClientConnection, fragment: str, seconds: float) -> None:
        with suppress(ConnectionClosed):  # the reader says why
            while True:
                await asyncio.sleep(seconds)  # a moment: as long as the page said
                await self._ask(socket, fragment)

    async def _read(self, socket: ClientConnection) -> None:
        begins = False
        async for data in socket:
            message = ForwardMsg.FromString(data if isinstance(data, bytes) else data.encode())
            kind = message.WhichOneof("type")
            if kind == "delta":
                if begins and not message.delta.fragment_id:  # the whole page is drawn anew
                    for task in self._refreshing.values():
                        task.cancel()
                    self._refreshing.clear()
                    self.shown.clear()
                begins = False
                self._element(message.delta.new_element)
            elif kind == "new_session":
                begins = True
            elif kind == "auto_rerun":
                asked = message.auto_rerun
                if (old := self._refreshing.get(asked.fragment_id)) is not None:
                    old.cancel()
                self._refreshing[asked.fragment_id] = asyncio.create_task(
                    self._refresh(socket, asked.fragment_id, asked.interval)
                )
            elif kind == "script_finished":
                self.drawn.set()

    def _element(self, element: Any) -> None:
        kind = element.WhichOneof("type")
        if kind == "exception":
            self.exceptions.append(f"{element.exception.type}: {element.exception.message}")
        elif kind in ("alert", "heading", "markdown"):
            self.shown.add(str(getattr(element, kind).body))


def away(session: Session) -> bool:
    return any("No answer from the service" in text for text in session.shown)


async def until(done: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(SECONDS):
        while not done():
            await asyncio.sleep(0.2)  # a moment: between two looks
    assert done(), what


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_sessions_see_no_exception_while_the_service_restarts(
    fresh_service: Any, dashboard: Callable[[str], Any]
) -> None:
    with Client(fresh_service.url) as client:
        client.create_dataset("hops", make_spec())
        client.post("hops", [make_trajectory(seed=seed) for seed in range(5)])
        client.create_run("first", "train", config={"seed": 1})
        client.log_metrics("first", [MetricPoint(key="a/b", step=1, value=1.0, time=1.0)])
    running = dashboard(fresh_service.url)
    sessions = [Session(PATHS[i % len(PATHS)]) for i in range(SESSIONS)]

    async def play() -> None:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(session.live(running.url, stop))
            await until(lambda: all(s.drawn.is_set() for s in sessions), "all are drawn")
            assert not any(away(s) for s in sessions)
            fresh_service.kill()
            await until(lambda: all(away(s) for s in sessions), "all say that it is away")
            await asyncio.to_thread(fresh_service.start)
            await until(lambda: not any(away(s) for s in sessions), "all came back")
            await until(
                lambda: all(any("service ok" in t for t in s.shown) for s in sessions),
                "all say that it is well",
            )
            stop.set()

    asyncio.run(play())
    assert [(s.path, s.exceptions) for s in sessions if s.exceptions] == []
    assert running.tracebacks() == []
