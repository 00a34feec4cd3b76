"""What makes an update fast changes nothing that it computes: it equals the benchmark's plain."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from amago_model import (
    Agent,
    AgentConfig,
    ConfigError,
    FeedForwardConfig,
    TransformerConfig,
    get_values,
    published_v3,
)
from amago_model.heads import critic
from amago_model.layers import make_mlp
from amago_model.runtime import compiling, host_memory
from benchmarks.flops import update_flops
from benchmarks.update_baseline import Baseline

LENGTHS = (6, 3, 1, 0, 4, 2, 6, 5)
TRANSFORMER = TransformerConfig(
    d_model=12, n_heads=2, d_ff=16, n_layers=2, context=7, attention="math"
)
FEED_FORWARD = FeedForwardConfig(d_model=12)
SETTINGS = {
    "DPG": ("continuous", TRANSFORMER, {}, {"n_critics": 4}, {}),
    "table": ("discrete", TRANSFORMER, {}, {"n_critics": 4}, {}),
    "samples": (
        "continuous",
        FEED_FORWARD,
        {
            "n_actions_in_critic_loss": 3,
            "n_actions_in_actor_loss": 2,
            "dpg_weight": 0.0,
            "filter": {"kind": "exp"},
        },
        {"n_critics": 4},
        {"continuous": {"kind": "beta"}},
    ),
    "replacement": ("continuous", FEED_FORWARD, {"n_step": 3}, {"subset_replacement": True}, {}),
    "once": ("continuous", FEED_FORWARD, {"auxiliary_gammas": ()}, {"n_critics": 2}, {}),
    "once drawn": ("continuous", FEED_FORWARD, {"auxiliary_gammas": ()}, {"n_critics": 4}, {}),
}


def _relative(ours: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == other.keys()
    off = torch.stack([(ours[k] - other[k]).norm() for k in ours]).norm()
    return float(off / torch.stack([x.norm() for x in other.values()]).norm())


def _gradients(agent: Agent) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in agent.named_parameters() if p.grad is not None}


def _settled(name: str, make_spaces, make_config, make_batch):  # type: ignore[no-untyped-def]
    kind, memory, losses, critics, actor = SETTINGS[name]
    config = make_config(memory, losses=losses, critic=critics, actor=actor)
    agent = Agent(config, make_spaces(kind))
    batch = make_batch(agent.spaces, lengths=LENGTHS)
    batch.action_known[0, 2] = False
    return agent, dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_equal_the_plain_ones(
    make_spaces, make_config, make_batch, monkeypatch, name: str
) -> None:
    monkeypatch.setattr(critic, "BLOCK", 200)  # a few states at once
    agent, batch = _settled(name, make_spaces, make_config, make_batch)
    plain = Baseline(agent, learning_rate=0.01, grad_clip=0.5)
    torch.manual_seed(5)  # dropout
    loss, _ = agent(batch)
    loss.backward()
    torch.manual_seed(5)
    other = plain.loss(batch)
    other.backward()
    assert float(loss.detach()) == pytest.approx(float(other.detach()), rel=1e-5)
    assert _relative(_gradients(agent), plain.named_gradients()) < 1e-5


@pytest.mark.parametrize("name", SETTINGS)
def test_three_updates_leave_the_weights_that_plain_ones_leave(
    make_spaces, make_config, make_batch, name: str
) -> None:
    agent, batch = _settled(name, make_spaces, make_config, make_batch)
    plain = Baseline(agent, learning_rate=0.001, grad_clip=0.5)
    optimizer = torch.optim.AdamW(agent.trainable_parameters(), lr=0.001, fused=True)
    begin = {n: p.detach().clone() for n, p in agent.named_parameters()}
    for _ in range(3):
        torch.manual_seed(5)
        agent(batch)[0].backward()
        torch.nn.utils.clip_grad_norm_(agent.trainable_parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        agent.update_targets()
        torch.manual_seed(5)
        plain.update(batch)
    pairs = {
        "policy": (agent.policy, plain.agent.policy),
        "critics.online": (agent.critics.online, plain.critics),
        "critics.target": (agent.critics.target, plain.targets),
        "target_actor": (agent.target_actor, plain.agent.target_actor),
    }
    for part, (ours, other) in pairs.items():
        moved = {n: p.detach() - begin[f"{part}.{n}"] for n, p in ours.named_parameters()}
        expected = {n: p.detach() - begin[f"{part}.{n}"] for n, p in other.named_parameters()}
        # Adam makes a step of a gradient of nothing but rounding, too.
        assert _relative(moved, expected) < 0.01, part
    torch.testing.assert_close(agent.critics.popart.mean, plain.norm.mean)


@pytest.mark.parametrize("bins", ["scalar", "twohot"])
def test_critics_answer_as_in_one_block_and_only_when_asked(
    make_spaces, make_config, monkeypatch, bins: str
) -> None:
    agent = Agent(make_config(critic={"n_critics": 4, "kind": bins}), make_spaces("continuous"))
    state, action = torch.randn(9, 12), torch.rand(3, 9, 2, 2) * 2.2 - 1.1
    whole, grads = _values_and_gradients(agent, state, action)
    monkeypatch.setattr(critic, "BLOCK", 4 * 3 * 2 * 16 * 2)  # two of nine states at once
    blocks, block_grads = _values_and_gradients(agent, state, action)
    torch.testing.assert_close(blocks, whole)
    for a, b in zip(block_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    chosen = torch.rand(4, 9, 2).topk(2, dim=0).indices
    asked = torch.zeros(4, 9, 2, dtype=torch.bool).scatter_(0, chosen, True).unsqueeze(1)
    some = agent.critics.online.subset_values(
        agent.critics.online.project_state(state), action, chosen
    )
    torch.testing.assert_close(some, torch.where(asked, whole, 0.0))
    assert 0 < int((some == 0).sum()) < some.numel()


def _values_and_gradients(agent, state, action):  # type: ignore[no-untyped-def]
    state, action = state.clone().requires_grad_(), action.clone().requires_grad_()
    values = agent.critics.online.values(agent.critics.online.project_state(state), action)
    inputs = [state, action, *agent.critics.online.parameters()]
    return values.detach(), torch.autograd.grad((values * values.cos()).sum(), inputs)


class _Normed(critic.CriticEnsemble):
    """Something of its own between its layers."""

    def _hidden(self, layers, x):  # type: ignore[no-untyped-def]
        return torch.nn.functional.layer_norm(super()._hidden(layers, x), x.shape[-1:])


@pytest.mark.parametrize("kind", ["plain", "with dropout", "of one's own", "other activation"])
def test_critics_in_dpg_answer_as_others_do(
    make_spaces, make_config, monkeypatch, kind: str
) -> None:
    served = []
    plain = critic.forward_frozen
    monkeypatch.setattr(critic, "forward_frozen", lambda *args: served.append(1) or plain(*args))
    changes = {"with dropout": {"dropout": 0.5}, "other activation": {"activation": "gelu"}}
    config = make_config(critic={"n_critics": 4, **changes.get(kind, {})})
    agent = Agent(config, make_spaces("continuous")).train()
    if kind == "of one's own":
        agent.critics.online.__class__ = _Normed
    state, action = torch.randn(9, 12), (torch.rand(3, 9, 2, 2) * 1.8 - 0.9).requires_grad_()
    results = []
    for frozen in (True, False):
        torch.manual_seed(3)
        part = agent.critics.online.project_state(state)
        values = agent.critics.online.values(
            part.detach() if frozen else part, action, frozen=frozen
        )
        lowest = values.mean(1).amin(0)
        results.append((values, *torch.autograd.grad(lowest.sum(), action)))
    assert bool(served) == (kind == "plain")
    for ours, other in zip(*results, strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("target", [1, 2])
def test_a_critic_that_nobody_draws_is_not_asked(
    make_spaces, make_config, make_batch, target: int
) -> None:
    config = make_config(critic={"n_critics": 5, "n_critics_target": target})
    agent = Agent(config, make_spaces("continuous"))
    loss, _ = agent(make_batch(agent.spaces, lengths=(1,)))
    assert bool(loss.isfinite())


def test_what_a_layer_made_of_states_keeps_its_gradient(make_spaces, make_config) -> None:
    agent = Agent(make_config(), make_spaces("continuous"))
    seen = agent.critics.online.project_state(torch.randn(4, 12, requires_grad=True))
    with torch.no_grad():
        part = seen.product
    assert part.requires_grad and not seen.detach().product.requires_grad


def test_target_networks_follow_weights_that_were_put_in_their_place(
    make_spaces, make_config
) -> None:
    agent = Agent(make_config(losses={"tau": 0.5}), make_spaces("continuous"))
    agent.update_targets()
    state = {name: x.clone() for name, x in agent.state_dict().items()}
    agent.load_state_dict(state, assign=True)
    agent.requires_grad_(False)
    before = agent.critics.target.weights[0].clone()
    agent.critics.online.weights[0] += 1.0
    agent.update_targets()
    torch.testing.assert_close(agent.critics.target.weights[0], before + 0.5)


@pytest.mark.parametrize("kind", ["discrete", "continuous"])
def test_padding_left_out_is_an_update_with_padding(
    make_spaces, make_config, make_batch, monkeypatch, kind: str
) -> None:
    agent = Agent(make_config(FEED_FORWARD, losses={"n_step": 2}), make_spaces(kind))
    twin = copy.deepcopy(agent)
    batch = make_batch(agent.spaces, lengths=LENGTHS)
    batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
    loss, metrics = agent(batch)
    loss.backward()
    values = get_values(agent, batch)
    assert agent.encode(batch).exists.shape == (sum(LENGTHS),)
    monkeypatch.setattr("amago_model.agent.flat_indices", lambda exists: None)  # noqa: ARG005
    other, other_metrics = twin(batch)
    other.backward()
    torch.testing.assert_close(loss, other, rtol=1e-5, atol=1e-6)
    for name, value in other_metrics.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-5)
    assert _relative(_gradients(agent), _gradients(twin)) < 1e-5
    torch.testing.assert_close(values.q[batch.mask], get_values(twin, batch).q[batch.mask])


@pytest.mark.parametrize("name", ["DPG", "table", "samples", "once", "once drawn"])
def test_counted_flops_are_those_that_torch_counts(
    make_spaces, make_config, make_batch, name: str
) -> None:
    kind, memory, losses, critics, actor = SETTINGS[name]
    config = make_config(memory, losses=losses, critic=critics, actor=actor)
    agent = Agent(config, make_spaces(kind))
    batch = make_batch(agent.spaces, lengths=LENGTHS)
    with FlopCounterMode(display=False) as counter:
        agent(batch, detailed=False)[0].backward()
    rows = sum(n + 1 for n in LENGTHS if n)
    exist = {"transitions": sum(LENGTHS), "rows": rows}
    counted = update_flops(config, agent.spaces, len(LENGTHS), 6, **exist)
    if memory is TRANSFORMER:  # plain attention has four products backward, fused ones a fifth
        counted -= 2 * (2 * len(LENGTHS) * 2 * 7 * 6 * 7)
    assert counted == counter.get_total_flops()


def test_layers_on_windows_write_into_no_view(make_spaces, make_config, make_batch) -> None:
    mlp = make_mlp(4, 8, 2, 3, activation="leaky_relu")
    x = torch.randn(5, 6, 4)
    torch.testing.assert_close(mlp(x), torch.stack([mlp(row) for row in x]))
    agent = Agent(make_config(TRANSFORMER), make_spaces("continuous"))
    for out in (mlp(x), agent(make_batch(agent.spaces))[0]):
        seen, queue = set(), [out.grad_fn]
        while queue:
            node = queue.pop()
            if node is not None and node not in seen:
                seen.add(node)
                queue += [parent for parent, _ in node.next_functions]
        assert not {type(node).__name__ for node in seen} & {"CopySlices"}


def test_half_precision_is_near_and_keeps_losses_and_statistics_whole(
    make_spaces, make_config, make_batch
) -> None:
    agent = Agent(make_config(TRANSFORMER), make_spaces("continuous"))
    twin = copy.deepcopy(agent)
    batch = make_batch(agent.spaces, lengths=LENGTHS)
    batch = dataclasses.replace(batch, noise=agent.draw_noise(*batch.mask.shape))
    torch.manual_seed(5)
    loss, _ = agent(batch)
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16):
        half, metrics = twin(batch)
    loss.backward()
    half.backward()
    assert float(half.detach()) == pytest.approx(float(loss.detach()), rel=0.05)
    assert half.dtype == torch.float32 and not torch.equal(half, loss)
    assert _relative(_gradients(twin), _gradients(agent)) < 0.2
    for x in (*metrics.values(), *twin.buffers(), *_gradients(twin).values()):
        assert x.dtype != torch.bfloat16


# -------------------------------------------------------------------------------- the allocator


@pytest.mark.skipif(host_memory.platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_freed_memory_comes_back_without_fresh_pages() -> None:
    code = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("host_memory", sys.argv[1])
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (40, 48, 56, 64):
        block = bytearray(b"x") * (size << 20)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(); before = faults(); assert module.keep_freed_memory(); faults(); print(before, faults())
"""
    command = [sys.executable, "-c", code, host_memory.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 10


# --------------------------------------------------------------------------------- the compiler


def test_a_compiled_update_draws_what_any_other_draws(
    make_spaces, make_config, make_batch, monkeypatch
) -> None:
    """Around a compiler that changes nothing: the same loss from the same seed and counts."""
    given = []

    def compile_nothing(forward, **options):  # type: ignore[no-untyped-def]
        given.append(options)
        return forward

    monkeypatch.setattr(compiling.torch, "compile", compile_nothing)
    monkeypatch.setattr(compiling, "compile_obstacle", lambda _: None)
    agent = Agent(make_config(), make_spaces("continuous")).eval()
    batch = make_batch(agent.spaces)
    counts = {k: float(v) for k, v in agent.loss_counts(batch).items()}
    torch.manual_seed(3)
    expected, _ = agent(batch, counts=counts)
    torch.manual_seed(3)
    loss, _ = compiling.compiled(agent, "cpu")(batch, counts=counts)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert given == [{"dynamic": False}]


def test_compiled_batches_have_few_lengths(
    make_spaces, make_config, make_batch, monkeypatch
) -> None:
    """Padded to powers of two, the longest window at most: and the loss stays what it is."""
    assert [compiling.bucket(t, 100) for t in (1, 8, 9, 33, 64, 65, 100)] == [
        *(8, 8, 16, 64, 64, 100, 100)
    ]
    assert compiling.bucket(300) == 512
    lengths = []

    def compile_nothing(forward, **_):  # type: ignore[no-untyped-def]
        def run(batch, **arguments):  # type: ignore[no-untyped-def]
            lengths.append(batch.mask.shape[1])
            return forward(batch, **arguments)

        return run

    monkeypatch.setattr(compiling.torch, "compile", compile_nothing)
    monkeypatch.setattr(compiling, "compile_obstacle", lambda _: None)
    agent = Agent(make_config(), make_spaces("continuous")).eval()
    forward = compiling.compiled(agent, "cpu", longest=12)
    for t in (3, 9, 12):
        batch = make_batch(agent.spaces, (t, t, 1), size=t)
        torch.manual_seed(3)
        expected, _ = agent(batch)
        torch.manual_seed(3)
        loss, _ = forward(batch)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert lengths == [8, 12, 12]


@pytest.mark.parametrize(
    "preset", [None, pytest.param(published_v3, marks=pytest.mark.long)], ids=["ours", "published"]
)
# The compiler's own, of any autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_whole_update_is_one_graph_for_a_compiler(
    make_spaces, make_config, make_batch, preset: Callable[..., AgentConfig] | None
) -> None:
    """Traced, differentiated ahead of time and run without generating code, which takes minutes."""
    compile_, counters = torch.compile, torch._dynamo.utils.counters
    config, spaces = make_config(), make_spaces("continuous")
    plain = Agent(config if preset is None else preset(config), spaces)
    traced, batch = copy.deepcopy(plain), make_batch(plain.spaces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "compile_obstacle", lambda _: None)
        patch.setattr(
            compiling.torch,
            "compile",
            lambda forward, **_: compile_(forward, backend="aot_eager", dynamic=False),
        )
        forward = compiling.compiled(traced, "cpu", longest=batch.mask.shape[1])
        torch._dynamo.reset()
        counters.clear()
        losses = []
        for run in (plain, forward):
            torch.manual_seed(3)
            loss, _ = run(batch, detailed=False)
            loss.backward()
            losses.append(loss.detach())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for (name, p), q in zip(plain.named_parameters(), traced.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)
    for x, y in zip(plain.buffers(), traced.buffers(), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)


def test_where_there_is_no_compiler_it_is_refused_by_name(
    make_spaces, make_config, monkeypatch
) -> None:
    agent = Agent(make_config(), make_spaces())
    monkeypatch.setattr(compiling, "compile_obstacle", lambda _: "RuntimeError: no g++")
    with pytest.raises(ConfigError, match=r"'cpu'.*no g\+\+"):
        compiling.compiled(agent, "cpu")
