"""Start: forms of the programs that launchers can start, and the launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import api, components, formatting, launching, programs
from dashboard.programs import Args, Setting
from dashboard.views import launches

ROLES = ("train", "collect", "evaluate", "run")
WHERE = "where"
"""A setting that may have many lines."""
FIRST = {
    "train": ("dataset", "run", "seed", "updates", WHERE),
    "collect": ("env", "dataset", "policy", "random", "wait_for_policy", "episodes", "run"),
    "evaluate": ("policy", "env", "episodes", "seeds", "videos", "run"),
}
"""Settings at the top of the form."""
SHARED = ("dataset", "env", "policy", "run", WHERE)
"""Settings that stay as they are when another recipe is chosen."""
LAUNCHER = "stepwell launcher --data ./launcher --capacity 2"
RUN_LINE = "stepwell run {env} --recipe {recipe}"
DERIVED = " What is not changed here is derived from the dataset, where the recipe derives it."
CLONED = "_cloned"
NEWEST = "newest"


@components.view("Start", "Start training, collecting or evaluating on a machine with a launcher.")
def show() -> None:
    clone = _clone()
    if clone is not None:
        st.session_state["role"] = clone.role
    role = st.segmented_control(
        "What", ROLES, key="role", default="train", bind="query-params",
        label_visibility="collapsed",
    )  # fmt: skip
    if role == "run":
        _run_line()
    else:
        _form(str(role or "train"), clone)
    components.guarded(launches.draw)


def _asked() -> tuple[str, str]:
    """What the address wants in the form."""
    return st.query_params.get("clone", ""), st.query_params.get("selection", "")


def _clone() -> launching.Clone | None:
    """What has to be put into the form, once each time that the page is opened."""
    clone = launching.clone(*_asked())
    # A page that was left has no widgets.
    is_there = st.session_state.get(CLONED) == _asked() and "copies" in st.session_state
    return None if is_there else clone


def _run_line() -> None:
    """`stepwell run` starts its own processes, so it is a command of the machine it runs on."""
    st.write("One command collects, learns and evaluates on the machine on which it is typed:")
    with st.container(horizontal=True, vertical_alignment="bottom"):
        envs = _environments() or ["Pendulum-v1"]
        env = st.selectbox("Environment", envs, key="run_env", accept_new_options=True)
        recipe = st.text_input("Recipe", "online", key="run_recipe")
    st.code(_exported(RUN_LINE.format(env=env, recipe=recipe)), language=None)


def _exported(line: str) -> str:
    return line if api.address() == api.DEFAULT_URL else f"{line} --url {api.address()}"


def _form(role: str, clone: launching.Clone | None) -> None:
    found = launching.program(role)
    if found is None:
        components.empty(
            f"No launcher that can {role} is running. A launcher is started once on each machine "
            "that should do the work, also on this one; it then starts what is asked for here:",
            _exported(LAUNCHER),
        )
        return
    program = found.program
    recipe = ""
    if role == "train":
        names = list(program.recipes)
        if clone is not None:
            st.session_state["recipe"] = clone.recipe or "default"
        recipe = str(
            st.selectbox("Recipe", names, key="recipe", bind="query-params",
                         index=names.index("offline") if "offline" in names else 0)
        )  # fmt: skip
        derived = program.recipes[recipe].values.get("derive", "off") != "off"
        st.caption(program.recipes[recipe].about + DERIVED * derived)
    settings = programs.settings_of(program, recipe)
    if clone is not None:
        st.session_state[CLONED] = _asked()
        _prefill(role, recipe, clone.args(settings), settings, program.common)
    args, wrong = _args(role, recipe, settings, program.common)
    wrong += programs.problems(role, settings, args)
    _go(role, recipe, args, settings, wrong, programs.missing(role, program, args), found)


def _args(
    role: str, recipe: str, settings: dict[str, Setting], common: list[str]
) -> tuple[Args, list[str]]:
    """Draw the settings; returns the changed ones, and what is wrong with the typed ones."""
    values: dict[str, Any] = {}
    top = [name for name in FIRST[role] if name in settings]
    narrow = [name for name in top if name != WHERE]
    for place, name in components.columns(narrow, 4, vertical_alignment="bottom"):
        with place:
            values[name] = _first(settings[name], _key(role, recipe, name))
    if WHERE in top:
        values[WHERE] = st.text_area(
            "where", key=_key(role, recipe, WHERE), help=settings[WHERE].help, height=98,
            placeholder="all trajectories; or a condition in SQL, such as \"return\" > 50",
        )  # fmt: skip
    rest = [name for name in common if name in settings and name not in top]
    with st.expander(f"{len(rest)} more settings that are often changed"):
        for place, name in components.columns(rest, 3, vertical_alignment="bottom"):
            with place:
                values[name] = _widget(settings[name], _key(role, recipe, name))
    with st.expander(f"All {len(settings)} settings"):
        _all(settings)
        text = st.text_area(
            "Others, one per line", key=_key(role, recipe, "more"),
            placeholder="agent.losses.td_lambda = 0.9",
        )  # fmt: skip
    try:
        more = parse_args(text or "")
    except ValueError as error:
        return programs.changed(settings, values), [str(error)]
    return {**programs.changed(settings, values), **more}, []


def _key(role: str, recipe: str, name: str) -> str:
    return f"set {role} {'' if name in SHARED else recipe} {name}"


def _all(settings: dict[str, Setting]) -> None:
    rows = [
        {"setting": s.name, "default": programs.as_text(s.default), "meaning": s.help}
        for s in settings.values()
    ]
    st.dataframe(
        pd.DataFrame(rows), hide_index=True, height=300, key="all_settings",
        column_config={
            "setting": st.column_config.TextColumn(width=260),
            "default": st.column_config.TextColumn(width=110),
            "meaning": st.column_config.TextColumn(width=900),
        },
    )  # fmt: skip


# --- one setting ----------------------------------------------------------------------------------


def _first(setting: Setting, key: str) -> Any:
    """A setting at the top: a menu of what exists, if it names something."""
    if setting.name == "dataset":
        return _dataset(key)
    if setting.name == "policy":
        runs = {run.name: run for run in api.runs(kind="train").items if run.policies}
        return _versioned(
            "policy", list(runs), key, "/", _policies, lambda name: api.label(name, runs)
        )
    if setting.name == "env":
        return _menu("env", _environments(), key)
    return _widget(setting, key)


def _dataset(key: str) -> str:
    names = [dataset.name for dataset in api.datasets()]
    return _versioned("dataset", names, key, "@", lambda name: [v.name for v in api.versions(name)])


def _policies(name: str) -> list[str]:
    found = api.policies(name)
    aliases = sorted({alias for p in found for alias in p.aliases} - {"latest"})
    return [*aliases, *(str(p.version) for p in found)]


def _environments() -> list[str]:
    return sorted({d.spec["env"] for d in api.datasets() if d.spec.get("env")})


def _menu(label: str, names: list[str], key: str, shown: Callable[[str], str] = str) -> str:
    given = st.session_state.get(key)
    known = names if given in (None, *names) else [given, *names]
    return st.selectbox(
        label, known, index=None, key=key, accept_new_options=True, placeholder="choose or type",
        format_func=shown,
    ) or ""  # fmt: skip


def _versioned(
    label: str, names: list[str], key: str, mark: str, versions: Any,
    shown: Callable[[str], str] = str,
) -> str:  # fmt: skip
    """A menu of names, and of the versions of the chosen one, if it has some."""
    given, _, which = str(st.session_state.get(key) or "").partition(mark)
    if which:  # of a copied launch
        st.session_state[key], st.session_state[f"{key}{mark}"] = given, which
    name = _menu(label, names, key, shown)
    if name not in names:
        return name
    found = versions(name)
    if not found:
        return name
    asked = st.session_state.get(f"{key}{mark}")
    options = [NEWEST, *found, *([asked] if asked not in (None, NEWEST, *found) else [])]
    chosen = st.selectbox(f"{label} version", options, key=f"{key}{mark}")
    return name if chosen in (None, NEWEST) else f"{name}{mark}{chosen}"


def _widget(setting: Setting, key: str) -> Any:
    """The widget of a setting's type, with its default. An empty number is none, if it can be."""
    label, note, default = setting.name, setting.help or None, setting.default
    if setting.kind == "switch":
        return st.checkbox(label, bool(default), key=key, help=note)
    if setting.kind == "choice":
        choices = setting.choices
        index = choices.index(default) if default in choices else 0
        return st.selectbox(label, choices, index=index, key=key, help=note)
    if setting.kind in ("integer", "number"):
        of: Any = int if setting.kind == "integer" else float
        low, high = (setting.bound(which) for which in ("minimum", "maximum"))
        value = st.number_input(
            label, key=key, help=note, placeholder="none",
            value=None if default is None else of(default),
            min_value=None if low is None else of(low),
            max_value=None if high is None else of(high),
            step=1 if of is int else None, format="%d" if of is int else "%g",
        )  # fmt: skip
        return default if value is None and not setting.nullable else value
    shown = programs.as_text(default or "")
    text = st.text_input(label, shown, key=key, help=note) or ""
    return default if text.split() == shown.split() else text


def _prefill(
    role: str, recipe: str, args: Args, settings: dict[str, Setting], common: list[str]
) -> None:
    """Set the widgets to the arguments of an earlier launch or run."""
    shown = {*FIRST[role], *common}
    more = []
    for name, value in args.items():
        setting = settings.get(name)
        if setting is None or name not in shown:
            more.append(f"{name} = {programs.as_text(value)}")
            continue
        typed: Any = value
        if setting.kind in ("integer", "number"):
            number = formatting.value_of(str(value))
            if isinstance(number, str):
                typed = None
            else:
                typed = int(number) if setting.kind == "integer" else float(number)
        elif setting.kind == "list":
            typed = programs.as_text(value)
        st.session_state[_key(role, recipe, name)] = typed
    st.session_state[_key(role, recipe, "more")] = "\n".join(more)


def parse_args(text: str) -> Args:
    """ "a.b = 1" per line → {"a.b": 1}; values are numbers, true, false or text."""
    args: Args = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not name or not equals or not value:
            raise ValueError(f"line {number}: expected `option = value`, got {line!r}")
        args[name.lstrip("-").replace("-", "_")] = formatting.value_of(value)
    return args


# --- before and after the button ------------------------------------------------------------------


def _go(
    role: str,
    recipe: str,
    args: Args,
    settings: dict[str, Setting],
    wrong: list[str],
    missing: list[str],
    found: launching.FoundProgram,
) -> None:
    lists = [name for name, setting in settings.items() if setting.kind == "list"]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        count = st.number_input(
            "Copies", 1, 64, 1, key="copies", width=120,
            help="Each has the next seed (or seeds), and a number after its name",
        )  # fmt: skip
        sent = st.button(
            "Launch", type="primary", key="launch_go", icon=":material/rocket_launch:",
            disabled=bool(wrong or missing),
        )  # fmt: skip
    if missing:  # no warning: nothing has been done wrongly
        st.caption(f"Still to choose: {', '.join(f'**{name}**' for name in missing)}.")
    for line in wrong:
        st.warning(line, icon=":material/error:")
    st.caption(launching.estimate(role, recipe, args, found))
    st.code(programs.command_line(role, recipe, args, lists), language=None, wrap_lines=True)
    if sent:
        components.change(
            lambda: api.client().create_launch(role, recipe, dict(args), int(count)),
            "waiting for a launcher",
        )
