"""A person at the dashboard: the real pages in a real Chromium, over a real service.

STEPWELL_SCREENSHOTS=DIR keeps a picture of each place where a test says `look`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell._ports import free_port
from stepwell.testing import wait_until

SECONDS = 180.0
"""For anything a page does: a busy machine is slow, and only a failed test waits that long."""
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
IDLE = """() => {
  const app = document.querySelector('[data-testid="stApp"]');
  return app && app.dataset.testScriptState === 'notRunning'
    && document.querySelector('h1') && !document.querySelector('[data-testid="stSkeleton"]');
}"""


class Dashboard:
    """`stepwell dash` in its own process."""

    def __init__(self, service_url: str, directory: Path):
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = directory / "dashboard.log"
        port = self.url.rsplit(":", 1)[1]
        command = [sys.executable, "-m", "dashboard.main", "--port", port, "--url", service_url]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("STEPWELL_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=inherited
            )
        try:
            wait_until(self._answers, SECONDS)
        except AssertionError:
            self.close()
            raise AssertionError(f"no dashboard:\n{self.log.read_text()}") from None

    def _answers(self) -> bool:
        import urllib.request

        assert self._process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=5):
                return True
        except OSError:
            return False

    def tracebacks(self) -> list[str]:
        """Lines of the log that start one."""
        return [line for line in self.log.read_text().splitlines() if "Traceback" in line]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Person:
    """What a person does with a page: every step waits for what it needs, and for the page."""

    def __init__(self, page: Any, url: str, pictures: Path | None):
        self.page, self.url, self._pictures = page, url, pictures
        page.set_default_timeout(SECONDS * 1000)
        self.requests: list[str] = []
        """Addresses that the page asked other hosts for."""
        page.on("request", self._remember)

    def _remember(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:", self.url.replace("http", "ws"))):
            self.requests.append(request.url)

    def opens(self, path: str) -> None:
        self.page.goto(self.url + path)
        self.rests()

    def rests(self) -> None:
        """Wait until the page is drawn; no traceback is on it."""
        self.page.wait_for_function(IDLE)
        traces = self.page.locator('[data-testid="stException"]')
        assert traces.count() == 0, traces.first.inner_text()

    def clicks(self, name: str, role: str = "button") -> None:
        """The button (or tab, or link) of this name; its icon is no part of it."""
        self.page.get_by_role(role, name=re.compile(rf"{re.escape(name)}$")).first.click()
        self.page.wait_for_timeout(100)  # Streamlit marks a script as running a moment later
        self.rests()

    def unfolds(self, name: str) -> None:
        """A part of the page that is closed at first."""
        self.page.locator("summary").filter(has_text=name).first.click()
        self.page.wait_for_timeout(100)
        self.rests()

    def types(self, label: str, text: str) -> None:
        field = self.page.get_by_label(label, exact=True).first
        field.fill(text)
        field.press("Tab")
        self.page.wait_for_timeout(100)
        self.rests()

    def chooses(self, label: str, option: str) -> None:
        """An option of a menu."""
        menu = self.page.get_by_role("combobox", name=re.compile(rf"{re.escape(label)}$")).first
        menu.click()
        menu.fill(option)
        self.page.get_by_role("option", name=option, exact=True).first.click()
        self.page.wait_for_timeout(100)
        self.rests()

    def adds(self, label: str, *options: str) -> None:
        """Options of a menu of several, one after another. A menu that is drawn anew in the moment
        of the click loses it; a person sees that, and chooses again."""
        name = re.compile(rf"{re.escape(label)}$")
        menu = self.page.get_by_role("combobox", name=name).first
        box = self.page.get_by_test_id("stMultiSelect").filter(has=menu)
        for option in options:
            chosen = box.get_by_text(option, exact=True)
            for _ in range(3):
                menu.click()
                menu.fill(option)
                self.page.get_by_role("option", name=option, exact=True).first.click()
                self.page.wait_for_timeout(100)
                self.rests()
                if chosen.count():
                    break
            assert chosen.count(), f"{option} could not be chosen in {label}"

    def sees(self, text: str) -> None:
        self.page.get_by_text(text).filter(visible=True).first.wait_for()

    def sees_cell(self, text: str, table: str = "") -> None:
        """A table draws on a canvas; its cells are in the accessible table inside."""
        cells = self.page.locator(f"{table} canvas [role=gridcell], {table} canvas th")
        cells.filter(has_text=text).first.wait_for(state="attached")

    def look(self, name: str) -> None:
        if self._pictures is not None:
            self._pictures.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=self._pictures / f"{name}.png")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The browser's program, without the right of root to put its threads above all others.

    With that right they run before those of the service and of the other tests.
    """
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here; Debian has it as the package chromium")
    setpriv = shutil.which("setpriv")
    if os.getuid() != 0 or setpriv is None:
        return path
    script = tmp_path_factory.mktemp("browser") / "chromium"
    command = f'{setpriv} --bounding-set=-sys_nice {shlex.quote(path)} "$@"'
    script.write_text(f"#!/bin/sh\nexec {command}\n")
    script.chmod(0o700)
    return str(script)


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Closed after each file: while Playwright runs, no other test can have an event loop."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Callable[[str], Dashboard]]:
    """dashboard(service_url): a running one."""
    started: list[Dashboard] = []

    def start(service_url: str) -> Dashboard:
        started.append(Dashboard(service_url, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def person(browser: Any) -> Iterator[Callable[..., Person]]:
    """person(dashboard, width, height, scheme): in a browser session of their own."""
    came: list[Person] = []
    folder = os.environ.get("STEPWELL_SCREENSHOTS")

    def come(
        dashboard: Dashboard, width: int = 1280, height: int = 900, scheme: str = "light"
    ) -> Person:
        size = {"width": width, "height": height}
        page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
        came.append(Person(page, dashboard.url, Path(folder) if folder else None))
        return came[-1]

    yield come
    for number, one in enumerate(came):
        one.look(f"end-{number}")  # after a failure: what was there to see
        one.page.context.close()
