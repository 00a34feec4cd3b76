"""`stepwell outbox`: what waits on this disk is shown, and sent; the exit status says if all is."""

from __future__ import annotations

import json

import pytest

from stepwell import Outbox, ServiceUnreachable, cli
from stepwell._outbox_folder import entries
from stepwell.testing import make_spec, make_trajectory

SPEC = make_spec()


class Away:
    """A service that was there once."""

    def __init__(self, url):
        self.url = url

    def with_options(self, **_):
        return self

    def post_stream(self, *_, **__):
        raise ServiceUnreachable("away")


def leave(folder, service, dataset, count, **options):
    """What a collector could not send: the ids."""
    outbox = Outbox(folder, Away(service.url), dataset, SPEC, **options)
    made = [make_trajectory(SPEC, seed=i) for i in range(count)]
    for trajectory in made:
        outbox.put(trajectory)
    outbox.close(0)
    return [t.id for t in made]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPWELL_OUTBOX")
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def test_it_lists_and_sends_what_lies_below(service, client, name, here, capsys):
    """To the service that it was meant for, without being told where that is."""
    client.create_dataset(name, SPEC)
    ids = leave(here / "a" / "0", service, name, 2) + leave(here / "a" / "1", service, name, 1)
    assert cli.main(["outbox", "list", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(s["waiting"], s["rejected"]) for s in shown] == [(2, 0), (1, 0)]
    assert shown[0]["held_by"] is None
    assert shown[0]["folder"] == str(here / "a" / "0")
    assert shown[0]["destination"]["dataset"] == name and shown[0]["oldest"] > 0
    assert cli.main(["outbox", "send"]) == 0
    assert capsys.readouterr().out == "sent 3 items of 2 outboxes\n"
    assert sorted(i.id for i in client.trajectories(name).items) == sorted(ids)
    assert not entries(here / "a" / "0")
    assert cli.main(["outbox", "list"]) == 0
    table = capsys.readouterr().out
    assert name in table and "a/0" in table
    assert cli.main(["outbox", "send"]) == 0
    assert capsys.readouterr().out == "sent 0 items of 0 outboxes\n"


def test_what_cannot_be_sent_is_said(service, name, here, capsys):
    """No such dataset: it waits, with the reason, and the status is 1."""
    leave(here / "x", service, name, 1)
    assert cli.main(["outbox", "send", "x", "--timeout", "0.5", "--json"]) == 1
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert answer["sent"] == 0 and "there is no dataset" in answer["outboxes"][0]["problem"]
    (line,) = printed.err.splitlines()
    assert line.startswith("stepwell outbox: 1 trajectory") and "they wait in" in line
    assert len(entries(here / "x")) == 1


def test_what_was_refused_is_shown_and_may_be_offered_again(service, client, name, here, capsys):
    client.create_dataset(name, make_spec(action=2))
    (one,) = leave(here / "x", service, name, 1)
    assert cli.main(["outbox", "send"]) == 1
    assert "1 trajectory refused by the service (" in capsys.readouterr().err
    assert cli.main(["outbox", "list"]) == 0
    assert "x: 1 rejected: " in capsys.readouterr().out
    assert cli.main(["outbox", "send"]) == 0, "nothing waits"
    client.delete_dataset(name)
    client.create_dataset(name, SPEC)
    assert cli.main(["outbox", "send", "--retry-rejected"]) == 0
    assert [i.id for i in client.trajectories(name).items] == [one]


def test_one_in_use_is_left_to_its_process(service, name, here, capsys):
    leave(here / "x", service, name, 2)
    with_it = Outbox(here / "x", Away(service.url), name, SPEC)
    assert cli.main(["outbox", "send"]) == 1
    assert "uses it and sends its 2 trajectories itself" in capsys.readouterr().err
    with_it.close(0)


def test_nothing_to_find_is_said(here, capsys):
    assert cli.main(["outbox", "list"]) == 0
    assert f"no outboxes in {here}" in capsys.readouterr().out
    assert cli.main(["outbox", "list", "nowhere"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err
    assert cli.main(["outbox", "send"]) == 2
    (here / "bad").mkdir()
    (here / "bad" / "outbox.json").write_text("{")
    assert cli.main(["outbox", "list"]) == 0
    assert "cannot be parsed; is this an outbox?" in capsys.readouterr().err


def test_its_help_teaches(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["outbox", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for word in ("stepwell outbox list", "stepwell outbox send", "exit status", "rejected/"):
        assert word in text
