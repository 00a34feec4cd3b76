"""`stepwell launcher`: what a launch may ask for, and what becomes of it and of the launcher.

Processes are real. Where the launcher alone is tested, `stepwell` is replaced by a script that does
what the launch's `where` says: "exit 3", "sleep 60", "stubborn".
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from collector.config import CollectConfig, EvaluateConfig, parse
from stepwell import Client
from stepwell._outbox_folder import entries
from stepwell._settings import flatten
from stepwell.client import ROLES
from stepwell.errors import NotFound
from stepwell.messages import Launch
from stepwell.testing import wait_until
from trainer.config import TrainConfig
from trainer.options import resolve
from trainer.recipes import RECIPES
from workbench.launcher import launch_permissions, loop
from workbench.launcher.launch_permissions import LauncherFolder, Refused, schema_of
from workbench.launcher.loop import Launcher, LauncherError, Options
from workbench.launcher.process import LaunchedProcess
from workbench.launcher.programs import program_of

ROOT = Path(__file__).parents[2]
FOLDER = LauncherFolder(Path("/somewhere"))
PENDULUM = {"env": "Pendulum-v1", "random": True, "envs": 1}


def launch(role="train", recipe="", args=None, count=1):
    return Launch(
        id="la_0198-abcdef", role=role, recipe=recipe, args=args or {}, count=count, created_at=0.0
    )


def words(*args, plugins=(), **kwargs):
    made = launch(*args, **kwargs)
    schema = schema_of(made.role)
    lines = launch_permissions.command_lines(made, schema, FOLDER, plugins)
    return [line.words for line in lines]


# --- the launch policy: what a launch may ask for -----------------------------------------------

# Folders and files, services, code; the bounds of a machine, and how its processes report. Mixtures
# come from files.
WITHHELD = {
    "train": "data.cache data.cache_gb output plugin recipe sources",
    "collect": "drain_timeout heartbeat_every outbox outbox_bytes plugin poll_every progress token "
    "url",
    "evaluate": "drain_timeout file outbox plugin scripted token upload url",
}


@pytest.mark.parametrize("role", WITHHELD)
def test_what_a_launch_may_set_is_decided_for_every_setting_of_the_command(role):
    """From the command's own schema: what is not listed here, a launch may set."""
    schema = schema_of(role)
    allowed = {name for name in schema if launch_permissions.may_set(name, schema[name])}
    assert schema.keys() - allowed == set(WITHHELD[role].split())
    assert not any("path" in json.dumps(schema[name]).split('"') for name in allowed)


@pytest.mark.parametrize(
    "setting",
    [
        {"type": "string"},
        {"type": "string", "format": "path"},
        {"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]},
        {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        {"type": ["string", "null"]},
        {"type": "array"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "number"}, "prefixItems": [{"type": "string"}]},
        {"type": "object"},
        {"oneOf": [{"type": "integer"}]},
        {"$ref": "#/$defs/Anything"},
        {},
    ],
    ids=json.dumps,
)
def test_a_new_setting_that_could_name_something_is_refused_until_somebody_decides(setting):
    assert not launch_permissions.may_set("new", setting)
    schema = {"new": setting}
    with pytest.raises(Refused, match="cannot set the option 'new': .*operator"):
        launch_permissions.command_lines(launch("collect", args={"new": "x"}), schema, FOLDER)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("new", {"type": "number"}),
        ("new", {"type": "boolean"}),
        ("new", {"enum": ["a", "b"], "type": "string"}),
        ("new", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        ("new", {"type": "array", "items": {"type": "integer"}}),
        ("tags", {"type": "array", "items": {"type": "string"}}),
    ],
    ids=str,
)
def test_numbers_switches_listed_words_and_known_text_are_allowed(name, setting):
    """But not in a setting that is withheld, and never where a path is allowed."""
    assert launch_permissions.may_set(name, setting)
    assert not launch_permissions.may_set("outbox_bytes", setting)
    assert not launch_permissions.may_set(name, {"anyOf": [setting, {"format": "path"}]})


def test_the_policy_names_only_settings_that_exist():
    every = {name for role in WITHHELD for name in schema_of(role)}
    named = launch_permissions.TEXT.keys() | launch_permissions.WITHHELD
    assert named <= every


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('no such package')"], "no such package"),
        ([sys.executable, "-c", "print([])"], "it printed no schema"),
        (["/no/such/program"], "cannot run on this machine"),
    ],
)
def test_a_command_that_cannot_say_its_settings_is_not_started(monkeypatch, program, says):
    monkeypatch.setattr(launch_permissions, "STEPWELL", program)
    with pytest.raises(Refused, match=says):
        launch_permissions._ask.__wrapped__("train")


@pytest.mark.parametrize("role", WITHHELD)
def test_a_program_has_the_settings_that_a_launch_may_change(role):
    """With the rules of text, so that a form refuses what the launcher would refuse."""
    program, schema = program_of(role, ["my_envs"]), schema_of(role)
    assert program.settings.keys() == schema.keys() - set(WITHHELD[role].split())
    assert program.plugins == ["my_envs"] and set(program.common) <= program.settings.keys()
    for name, setting in program.settings.items():
        assert setting["description"], name
        pattern = setting.get("pattern") or setting.get("items", {}).get("pattern")
        assert bool(pattern) == (name in launch_permissions.TEXT and name != "where"), name
    assert program.required == {"train": [], "collect": ["env", "dataset"], "evaluate": []}[role]


def test_a_program_describes_recipes_by_what_they_change():
    """A form shows a recipe's values as defaults: they are those that training would use."""
    program = program_of("train")
    assert program.recipes.keys() == RECIPES.keys()
    defaults = {name: setting.get("default") for name, setting in program.settings.items()}
    for name, found in program.recipes.items():
        values = flatten(resolve([name]).config.to_dict())
        shown = {**defaults, **found.values}
        for key in shown.keys() & values.keys():
            is_switch = program.settings[key].get("type") == "boolean"
            assert shown[key] == (bool(values[key]) if is_switch else values[key]), (name, key)
    assert program.recipes["bc"].values["agent.critic"] is False
    speed = program.recipes["offline"]
    assert speed.updates == 6000 and speed.updates_per_second > 0


def test_a_launch_may_choose_the_compiler():
    (found,) = words(args={"dataset": "d", "run": "r", "compile": "off"})
    assert "--compile=off" in found and TrainConfig().compile == "auto"


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("train", "output data.cache config url token plugin sources agent x"),
        ("collect", "outbox file plugin token url config upload"),
        ("evaluate", "outbox file plugin token url config upload"),
    ],
)
def test_an_option_that_is_not_on_the_list_is_refused_by_name(role, options):
    for option in options.split():
        with pytest.raises(Refused, match=f"'{option}'"):
            words(role, args={option: "v"})


@pytest.mark.parametrize("name", ["-run", "--run", "Run", "run=x", "a b", "", "run\n", "rün"])
def test_names_of_options_are_plain(name):
    with pytest.raises(Refused, match="cannot set the option"):
        words(args={name: "x"})


@pytest.mark.parametrize(
    ("role", "option", "value"),
    [
        ("train", "dataset", "../../etc"),
        ("train", "run", "a/b"),
        ("train", "run", "--help"),
        ("train", "run", "x" * 128 + "y"),
        ("train", "snapshot", "../s"),
        ("train", "seed", float("nan")),
        ("train", "where", "a\0b"),
        ("train", "where", "x" * 20_000),
        ("train", "where", ["a"]),
        ("train", "where", None),
        ("train", "agent.losses.auxiliary_gammas", "0.5 --output=/x"),
        ("collect", "env", "os:Pendulum-v1"),
        ("collect", "env", "--help"),
        ("collect", "policy", "../run"),
        ("collect", "tags", "good --outbox=/x"),
        ("collect", "env_args", "xml_file=/etc/passwd"),
        ("collect", "env_args", "xml_file=ant.xml"),
        ("collect", "env_args", "benchmark=rules"),
        ("collect", "env_args", "delay"),
        ("collect", "device", "cuda:0 "),
    ],
)
def test_values_that_mean_more_than_a_number_are_checked(role, option, value):
    with pytest.raises(Refused, match=option):
        words(role, args={option: value})


@pytest.mark.parametrize("recipe", ["--config", "-h", "../x", "a.b", "X"])
def test_a_recipe_is_a_name_and_never_an_option(recipe):
    with pytest.raises(Refused, match="recipe"):
        words(recipe=recipe)


def test_only_training_has_recipes_and_an_option_comes_once():
    with pytest.raises(Refused, match="no recipe"):
        words("collect", "offline", PENDULUM)
    with pytest.raises(Refused, match="twice"):
        words(args={"data.wait_for_data": 1, "data.wait-for-data": 2})


def test_a_value_that_looks_like_an_option_stays_a_value():
    """The trainer's own parser reads the words that the launcher makes."""
    args = {
        "dataset": "d",
        "where": "--output=/etc --config x",
        "seed": -1,
        "data.batch": 8,
        "data.include_eval": True,
        "agent.losses.gamma": 0.5,
        "agent.losses.auxiliary_gammas": "0.25 0.75",
        "agent.timestep-encoder.hide_previous": False,
    }
    (line,) = words("train", "offline", args)
    config = resolve(line[1:]).config
    values = flatten(config.to_dict())
    assert config.where == "--output=/etc --config x"
    assert (config.seed, config.recipe, config.run) == (-1, "offline", "offline-abcdef")
    assert values["data.batch"] == 8 and values["data.include_eval"] is True
    assert values["agent.losses.gamma"] == 0.5
    assert values["agent.losses.auxiliary_gammas"] == [0.25, 0.75]
    assert values["agent.timestep_encoder.hide_previous"] is False
    assert config.output == FOLDER.data / "runs" and config.data.cache == FOLDER.data / "cache"


def test_the_collector_and_the_evaluator_read_their_words_too():
    env_args = ("g=9.81", "fast=true", "env=CartPole-v1")
    args = {**PENDULUM, "dataset": "d", "tags": "a b", "env_args": " ".join(env_args)}
    args = {**args, "sample": False, "epsilon.kind": "greedy"}
    (line,) = words("collect", args=args)
    config = parse(CollectConfig, line[1:], "x")
    assert (config.tags, config.env_args) == (("a", "b"), env_args)
    assert config.random and not config.sample
    assert config.outbox == FOLDER.outboxes / config.run
    (line,) = words("evaluate", args={"env": "E-v1", "policy": "r/7"}, plugins=["m"])
    config = parse(EvaluateConfig, line[1:], "x")
    assert (config.policy, config.plugin, config.run) == ("r/7", ("m",), "eval-r-7-abcdef")


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [({}, ("envs", "my.parts")), ({"plugin": "my.parts"}, ("my.parts",)), ({"plugin": ""}, ())],
)
def test_every_role_loads_the_operators_plugins_or_chooses_among_them(
    asked, loaded, monkeypatch, tmp_path
):
    """What a trainer registers, a collector of its policy needs as well."""
    (tmp_path / "my").mkdir()
    for module in ("envs.py", "my/__init__.py", "my/parts.py"):
        (tmp_path / module).touch()
    monkeypatch.syspath_prepend(tmp_path)
    plugins = ("envs", "my.parts")
    parts = {"agent.custom.filter": "soft", "data.relabel": "mine:a=1 mine:a=2", **asked}
    (line,) = words("train", "offline", {"dataset": "d", **parts}, plugins=plugins)
    config = resolve(line[1:]).config
    assert (config.plugin, config.agent.custom.filter) == (loaded, "soft")
    assert config.data.relabel == ("mine:a=1", "mine:a=2")
    for role, made in (("collect", CollectConfig), ("evaluate", EvaluateConfig)):
        args = {**PENDULUM, **({"dataset": "d"} if role == "collect" else {}), **asked}
        (line,) = words(role, args=args, plugins=plugins)
        assert parse(made, line[1:], "x").plugin == loaded


@pytest.mark.parametrize("role", WITHHELD)
@pytest.mark.parametrize("asked", ["os", "envs os", "envs --output=/x", "my.parts.deeper", 1, True])
def test_a_module_that_the_operator_did_not_name_is_refused(role, asked):
    with pytest.raises(Refused, match=r"'plugin'.*of envs, my.parts"):
        words(role, args={"plugin": asked}, plugins=("envs", "my.parts"))
    with pytest.raises(Refused, match="this launcher has no --plugin"):
        words(role, args={"plugin": asked})


def test_every_recipe_can_be_launched():
    for name in RECIPES:
        (line,) = words("train", name, {"dataset": "d"})
        assert resolve(line[1:]).config.recipe == name


def test_several_processes_differ_in_name_and_seed():
    lines = words(args={"dataset": "d", "run": "r"}, count=3)
    configs = [resolve(line[1:]).config for line in lines]
    assert [c.run for c in configs] == ["r-1", "r-2", "r-3"]
    assert [c.seed for c in configs] == [0, 1, 2]
    lines = words("collect", args={**PENDULUM, "dataset": "d", "seed": 5}, count=2)
    assert [parse(CollectConfig, line[1:], "x").seed for line in lines] == [5, 6]
    lines = words("evaluate", args={**PENDULUM, "episodes": 10, "seeds": 100}, count=2)
    assert [parse(EvaluateConfig, line[1:], "x").seeds for line in lines] == [100, 110]


def test_a_collector_without_a_seed_draws_its_own():
    for line in words("collect", args={**PENDULUM, "dataset": "d"}, count=2):
        assert parse(CollectConfig, line[1:], "x").seed is None


# --- with the real collector ------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(service, tmp_path_factory):
    """A service of this module alone: launches of other tests are not ours to claim."""
    process = type(service)(tmp_path_factory.mktemp("launchers")).start()
    yield process
    process.close()


@pytest.fixture
def api(own):
    with Client(own.url) as client:
        yield client


@pytest.fixture
def launcher_process(own, tmp_path):
    """Starts `stepwell launcher` on one directory; killed at the end with whatever it started."""
    started = []

    def start(*args):
        env = {**os.environ, "STEPWELL_URL": own.url, "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "stepwell.cli", "launcher", "--data", tmp_path / "data"]
        with (tmp_path / "launcher.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--poll", "0.1", *args], env=env, cwd=tmp_path, stderr=log
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    for record in (tmp_path / "data" / "launches").glob("*.json"):
        for process in json.loads(record.read_text())["processes"]:
            if process["state"] == "running" and process["pid"]:
                try:
                    os.killpg(process["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    pass


until = wait_until


def wait_state(client, made, *states):
    return until(lambda: (x := client.launch(made.id)).state in states and x)


def test_launches_become_processes_or_errors(api, launcher_process, name, tmp_path):
    """One that works, one refused, one of no recipe, one of a wrong type: each says how it went."""
    good = api.create_launch("collect", args={**PENDULUM, "dataset": name, "episodes": 1})
    bad = api.create_launch("collect", args={**PENDULUM, "dataset": name, "outbox": str(tmp_path)})
    none = api.create_launch("train", "no_such_recipe")
    typo = api.create_launch("collect", args={**PENDULUM, "dataset": name, "episodes": "many"})
    process = launcher_process("--capacity", "2")

    done = wait_state(api, good, "finished", "failed")
    assert (done.state, done.error) == ("finished", "")
    page = api.trajectories(name)
    assert len(page.items) == 1 and page.items[0].run == done.run
    assert api.run(done.run).status == "finished"
    assert f"$ stepwell collect --run={done.run}" in log_of(tmp_path, good).read_text()
    assert (tmp_path / "data" / "outbox" / done.run).is_dir()

    refused = wait_state(api, bad, "failed")
    assert refused.error.startswith("refused:") and "'outbox'" in refused.error
    assert not log_of(tmp_path, bad).exists()
    assert "unknown recipe 'no_such_recipe'" in wait_state(api, none, "failed").error
    error = wait_state(api, typo, "failed").error
    assert "refused by its own parser" in error and "--episodes" in error

    assert "stepwell collect" in api.launch_log(good.id) and not api.launch_log(bad.id)
    worker = next(w for w in api.workers() if w.role == "launcher" and w.alive)
    assert worker.counters["capacity"] == 2
    until(lambda: found(api.program, worker.id, "evaluate"))
    assert api.program(worker.id, "collect") == program_of("collect")
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 0
    worker = next(w for w in api.workers() if w.id == worker.id)
    assert worker.state == "stopped" and worker.counters["failed"] == 3
    assert not list((tmp_path / "data" / "launches").iterdir())


def found(read, *args):
    try:
        return read(*args)
    except NotFound:
        return None


def test_the_end_of_a_running_launchs_output_is_at_the_service(api, launcher, monkeypatch):
    monkeypatch.setattr(loop, "LOG_EVERY", 0.0)
    made = ask(api, "chatty", count=2)
    launcher(capacity=2)
    until(lambda: api.launch_log(made.id).count("I am here") == 2)
    assert api.launch(made.id).state == "running"
    assert api.launch_log(made.id).startswith("--- ")
    api.cancel_launch(made.id)


def test_the_tail_of_a_log_is_whole_lines(tmp_path):
    process = LaunchedProcess(run="r", command=[], role="train", log=tmp_path / "x.log")
    assert process.log_tail(10) == ""
    process.log.write_text("first\nsecond\nthird\n")
    assert process.log_tail(10) == "third\n"
    assert process.log_tail(100) == "first\nsecond\nthird\n"


def log_of(tmp_path, made):
    return tmp_path / "data" / "logs" / f"{made.id}-1.log"


def test_a_cancelled_launch_ends_its_collector_cleanly(api, launcher_process, name):
    made = api.create_launch("collect", args={**PENDULUM, "dataset": name, "run": f"{name}-run"})
    launcher_process("--roles", "collect")
    until(lambda: any(w.run == f"{name}-run" and w.state == "running" for w in api.workers()))
    api.cancel_launch(made.id)
    until(lambda: api.run(f"{name}-run").status == "stopped")
    collector = next(w for w in api.workers() if w.run == f"{name}-run")
    until(lambda: not running(collector.pid))
    until(lambda: any(w.role == "launcher" and w.counters["cancelled"] == 1 for w in api.workers()))
    assert api.launch(made.id).state == "cancelled"


def test_a_killed_launcher_finds_its_collector_again(api, launcher_process, name):
    """SIGKILL for the launcher: the collector stays; the next launcher answers for it."""
    waits = {"policy": f"{name}-trainer", "wait_for_policy": True}
    made = api.create_launch(
        "collect", args={**PENDULUM, "random": False, **waits, "dataset": name}
    )
    first = launcher_process("--roles", "collect")
    wait_state(api, made, "running")
    collector = until(lambda: next((w for w in api.workers() if w.role == "collect"
                                    and w.run == api.launch(made.id).run), None))  # fmt: skip
    first.kill()
    first.wait()
    assert running(collector.pid)
    second = launcher_process("--roles", "collect")
    until(lambda: any(w.role == "launcher" and w.pid == second.pid for w in api.workers()))
    assert api.launch(made.id).state == "running"

    second.send_signal(signal.SIGTERM)
    assert second.wait(240) == 0
    ended = api.launch(made.id)
    assert ended.state == "failed" and "stopped with its launcher" in ended.error
    assert api.run(ended.run).status == "stopped"
    until(lambda: not running(collector.pid))


def running(pid):
    """Whether the process lives; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- the launcher alone, with scripts for processes ----------------------------------------------

SCRIPT = """
import signal, sys, time
where = next(w.split("=", 1)[1] for w in sys.argv if w.startswith("--where="))
if where == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    where = "sleep 60"
if where == "chatty":
    print("I am here", flush=True)
    where = "sleep 60"
word, number = where.split()
if number == "seed":
    number = next((w.split("=", 1)[1] for w in sys.argv if w.startswith("--seed=")), "0")
if word == "exit":
    print("the last words")
    sys.exit(int(number))
time.sleep(float(number))
"""


class Running:
    """A launcher in a thread of this process."""

    def __init__(self, url, data, name, **options):
        self.folder = LauncherFolder(data)
        self.folder.make()
        chosen = {"roles": ROLES, "capacity": 1, "plugins": (), "poll": 0.05}
        self.launcher = Launcher(
            Options(name=name, folder=self.folder, **{**chosen, "grace": 20.0, **options}),
            Client(url, timeout=2.0, retry_for=0.0),
        )
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.launcher.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self.launcher.client.close()

    def end(self, word="stop"):
        self.launcher.request(word)
        self.thread.join(120)
        assert not self.thread.is_alive()


@pytest.fixture
def launcher(own, tmp_path, name, monkeypatch):
    monkeypatch.setattr(loop, "STEPWELL", [sys.executable, "-S", "-c", SCRIPT])
    monkeypatch.setattr(loop, "HEARTBEAT_EVERY", 0.1)
    started = []

    def start(url=own.url, **options):
        started.append(Running(url, tmp_path / "data", name, **options))
        return started[-1]

    yield start
    for each in started:
        if each.thread.is_alive():
            each.end("kill")


def ask(api, where, count=1, **args):
    return api.create_launch("train", "offline", {"where": where, **args}, count)


def test_a_failure_is_told_with_the_end_of_its_log(api, launcher):
    made = ask(api, "exit 4")
    launcher()
    failed = wait_state(api, made, "failed")
    assert "status 4" in failed.error and "the last words" in failed.error
    assert failed.run == f"offline-{made.id[-6:]}"


def test_one_failure_of_several_processes_fails_the_launch(api, launcher):
    made = ask(api, "exit seed", count=2)
    launcher(capacity=2)
    failed = wait_state(api, made, "finished", "failed")
    assert failed.state == "failed" and "-2 ended (status 1)" in failed.error
    assert "-1 ended" not in failed.error


def test_no_more_processes_run_at_a_time_than_there_are_slots(api, launcher):
    made = ask(api, "sleep 0.3", count=3)
    running_launcher = launcher(capacity=2)
    seen = set()
    while (state := api.launch(made.id)).state in ("queued", "claimed", "running"):
        works = list(running_launcher.launcher._launches.values())
        seen.add(sum(len(w.with_state("running")) for w in works))
    assert state.state == "finished" and max(seen) == 2
    assert state.run == f"offline-{made.id[-6:]}-1 … offline-{made.id[-6:]}-3"


def test_a_launch_that_needs_more_slots_than_there_are_is_refused(api, launcher):
    made = ask(api, "exit 0", processes=3)
    launcher(capacity=2)
    assert "at most 2" in wait_state(api, made, "failed").error


def looks(running_launcher):
    """A list that grows by one with each answer to "is there a launch for me?"."""
    return counted(running_launcher.launcher.client, "claim_launch")


def syncs(running_launcher):
    """A list that grows by one whenever the launcher has talked with the service."""
    return counted(running_launcher.launcher, "_sync")


def counted(owner, name):
    calls, honest = [], getattr(owner, name)

    def count(*args, **options):
        result = honest(*args, **options)
        calls.append(result)
        return result

    setattr(owner, name, count)
    return calls


def test_roles_choose_what_is_claimed(api, launcher):
    made = ask(api, "exit 0")
    asked = looks(launcher(roles=("collect",)))
    until(lambda: len(asked) >= 3)
    assert api.launch(made.id).state == "queued"
    api.cancel_launch(made.id)


def test_pause_and_resume_and_drain(api, launcher, name):
    """Paused it claims nothing; drained it finishes what it has, claims nothing more, and ends."""
    running_launcher = launcher()
    until(lambda: any(w.id == name and w.state == "running" for w in api.workers()))
    api.command(name, "pause")
    until(lambda: any(w.id == name and w.state == "paused" for w in api.workers()))
    made = ask(api, "sleep 1")
    asked = syncs(running_launcher)
    until(lambda: len(asked) >= 3)
    assert api.launch(made.id).state == "queued"
    api.command(name, "resume")
    wait_state(api, made, "running")
    later = ask(api, "exit 0")
    api.command(name, "drain")
    running_launcher.thread.join(120)
    assert not running_launcher.thread.is_alive() and running_launcher.error is None
    assert api.launch(made.id).state == "finished"
    assert api.launch(later.id).state == "queued"
    assert next(w for w in api.workers() if w.id == name).state == "stopped"
    api.cancel_launch(later.id)


def test_stop_as_a_command_stops_children_too(api, launcher, name):
    made = ask(api, "sleep 60")
    running_launcher = launcher()
    wait_state(api, made, "running")
    api.command(name, "stop")
    running_launcher.thread.join(120)
    assert not running_launcher.thread.is_alive()
    assert "stopped with its launcher" in wait_state(api, made, "failed").error


def test_a_child_that_does_not_listen_is_killed_after_its_grace(api, launcher, tmp_path):
    made = ask(api, "stubborn")
    launcher(grace=0.3)
    until(lambda: log_of(tmp_path, made).exists() and "ready" in log_of(tmp_path, made).read_text())
    (record,) = (tmp_path / "data" / "launches").glob("*.json")
    pid = json.loads(record.read_text())["processes"][0]["pid"]
    api.cancel_launch(made.id)
    until(lambda: not running(pid))


def test_a_cancelled_launch_starts_none_of_what_still_waits(api, launcher, tmp_path):
    made = ask(api, "sleep 60", count=2)
    running_launcher = launcher()
    until(lambda: log_of(tmp_path, made).exists())
    api.cancel_launch(made.id)
    until(lambda: not running_launcher.launcher._launches)
    assert not (tmp_path / "data" / "logs" / f"{made.id}-2.log").exists()


def test_a_launcher_told_to_kill_does_not_wait(api, launcher, tmp_path):
    made = ask(api, "stubborn")
    running_launcher = launcher(grace=60.0)
    until(lambda: log_of(tmp_path, made).exists() and "ready" in log_of(tmp_path, made).read_text())
    running_launcher.end("kill")
    assert api.launch(made.id).state == "failed"


def test_a_claim_whose_answer_was_lost_is_taken_up(api, launcher, name):
    made = ask(api, "exit 0")
    claimed = api.claim_launch(name)
    assert claimed is not None and claimed.id == made.id
    launcher()
    assert wait_state(api, made, "finished", "failed").state == "finished"


def test_what_ended_while_no_launcher_was_there_is_asked_of_its_run(api, own, tmp_path, name):
    """Nobody saw the exit status; the run's row says how it went."""
    folder = LauncherFolder(tmp_path / "data")
    folder.make()
    outcome = {}
    for run, status in ((f"{name}-a", "finished"), (f"{name}-b", "failed")):
        made = ask(api, "sleep 1", run=run)
        claimed = api.claim_launch(name)
        lines = launch_permissions.command_lines(claimed, schema_of("train"), folder)
        kept = loop.ClaimedLaunch.create(claimed, 1, lines, folder)
        kept.processes[0].state, kept.processes[0].pid = "running", 2**22 + 1
        kept.processes[0].log.write_text("the last words\n")
        kept.save(folder)
        api.create_run(run, "train")
        api.patch_run(run, status=status)
        outcome[status] = made
    running_launcher = Running(own.url, tmp_path / "data", name)
    assert wait_state(api, outcome["finished"], "finished", "failed").state == "finished"
    failed = wait_state(api, outcome["failed"], "failed")
    assert "nobody saw how" in failed.error and "the last words" in failed.error
    running_launcher.end()


def test_a_name_that_another_living_launcher_has_is_refused(api, launcher, name):
    api.heartbeat(name, role="launcher", host="elsewhere", pid=1)
    second = launcher()
    second.thread.join(120)
    assert isinstance(second.error, LauncherError) and "elsewhere" in str(second.error)


def test_children_and_reports_survive_an_outage(start_service, launcher, tmp_path):
    """The service goes, the process ends meanwhile; when the service is back it hears of that."""
    service = start_service()
    with Client(service.url, retry_for=0.0) as client:
        made = ask(client, "sleep 1")
        running_launcher = launcher(url=service.url)
        wait_state(client, made, "running")
        until(lambda: log_of(tmp_path, made).exists())
        service.kill()
        until(lambda: not running_launcher.launcher._active)
        assert running_launcher.launcher._launches, "not forgotten before it was told"
        service.restart()
        assert wait_state(client, made, "finished", "failed").state == "finished"
        again = ask(client, "exit 0")
        assert wait_state(client, again, "finished", "failed").state == "finished"
        running_launcher.end()


def test_what_children_could_not_send_is_sent(api, own, name, tmp_path):
    from stepwell import Outbox
    from stepwell.testing import make_spec, make_trajectory

    spec = make_spec()
    api.create_dataset(name, spec)
    folder = LauncherFolder(tmp_path / "data").outboxes / "some-run"
    with Client("http://127.0.0.1:9", retry_for=0.0) as nobody:
        outbox = Outbox(folder, nobody, name, spec)
        outbox.put(make_trajectory(spec, seed=1))
        outbox.close(0.0)
        of_run = tmp_path / "data" / "runs" / f"run-{name}" / "outbox"
        outbox = Outbox(of_run, nobody, run=f"run-{name}")
        outbox.put_metrics(f"run-{name}", 1, {"loss": 0.5})
        outbox.close(0.0)
    api.create_run(f"run-{name}", "train")
    running_launcher = Running(own.url, tmp_path / "data", name)
    until(lambda: len(api.trajectories(name).items) == 1)
    until(lambda: api.metrics(f"run-{name}"))
    running_launcher.end()
    assert not entries(folder) and not entries(of_run)


# --- the command and its page -------------------------------------------------------------------


def test_the_page_for_operators_lists_what_is_decided_by_name():
    text = (ROOT / "docs" / "reference" / "workers.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    text_rows = rows["text that matches the setting's pattern"] + rows["the same, of the agent"]
    named = set(re.findall(r"`([a-z0-9_.]+)`", text_rows))
    assert named == set(launch_permissions.TEXT)
    named = set(re.findall(r"`([a-z0-9_.]+)`", rows["none"]))
    assert launch_permissions.WITHHELD <= named


def test_one_directory_has_one_launcher_and_one_name(own, launcher_process, api, tmp_path):
    first = launcher_process("--roles", "collect")
    path = tmp_path / "data" / "launcher.json"
    until(path.exists)
    chosen = json.loads(path.read_text())["name"]
    second = launcher_process("--roles", "collect")
    assert second.wait(120) == 1
    assert "another launcher uses" in (tmp_path / "launcher.log").read_text()
    until(lambda: any(w.id == chosen for w in api.workers()))
    first.send_signal(signal.SIGINT)
    assert first.wait(120) == 0


@pytest.mark.parametrize(
    "wrong", [["--capacity", "0"], ["--name", "a b"], ["--plugin", "a/b"], ["--poll", "0"]]
)
def test_wrong_options_of_the_launcher_itself(wrong, capsys):
    from workbench.launcher import main as launcher

    with pytest.raises(SystemExit):
        launcher.main(wrong)
    assert wrong[0] in capsys.readouterr().err
