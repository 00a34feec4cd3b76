"""Observations of every kind to one vector: recognised, embedded, hidden, masked, saved."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from amago_model import (
    ActionSpace,
    Agent,
    AgentConfig,
    AugmentConfig,
    Batch,
    BatchError,
    ConfigError,
    GoalConfig,
    GRUConfig,
    ImageTimestepEncoderConfig,
    ImpalaImageConfig,
    LossConfig,
    ObsSpace,
    PlainImageConfig,
    Spaces,
    TimestepEncoderConfig,
    TokenConfig,
    get_values,
    load_policy,
    save_policy,
    unused_settings,
)
from amago_model.encoders.modalities import modalities_of
from amago_model.encoders.observation_features import vector_features
from amago_model.encoders.timestep import TimestepEncoder
from amago_model.encoders.tokens_and_goals import GoalEncoder, TokenEncoder
from tests.amago_model.settings import configured

FOUR = ActionSpace(kind="discrete", n=4)
IMAGE = ObsSpace(shape=(8, 6, 3), dtype="uint8")
# Names that a module has for itself, too: an observation may be called anything.
EVERYTHING = {
    "camera/left": IMAGE,
    "items": ObsSpace(shape=(3, 9, 7), dtype="uint8"),
    "float_image": ObsSpace(shape=(5, 5, 2), dtype="float32"),
    "mission": ObsSpace(shape=(6,), dtype="int64", n=40),
    "place": ObsSpace(shape=(), dtype="int64", n=200),
    "words": ObsSpace(shape=(2, 3), dtype="int32"),
    "goals": ObsSpace(shape=(3, 2), dtype="float32"),
    "type": ObsSpace(shape=(4,), dtype="float32"),
    "few": ObsSpace(shape=(), dtype="int64", n=3),
}
SMALL = TimestepEncoderConfig(
    d_hidden=16,
    d_output=12,
    images=PlainImageConfig(keys=("float_image",), d_output=10),
    tokens=TokenConfig(keys=("words",), vocabulary=30, lowest=-3, padding=0, d_hidden=8),
    goals=GoalConfig(keys=("goals",), d_output=6),
)


def spaces_of(**observations: ObsSpace) -> Spaces:
    return Spaces(observations=observations, action=FOUR)


def draw(space: ObsSpace, *rows: int) -> Tensor:
    if space.n is not None:
        return torch.randint(0, space.n, (*rows, *space.shape))
    if space.dtype == "uint8":
        return torch.randint(0, 256, (*rows, *space.shape), dtype=torch.uint8)
    if space.dtype.startswith("int"):
        return torch.randint(-4, 40, (*rows, *space.shape), dtype=torch.int32)
    return torch.randn(*rows, *space.shape)


def observations(spaces: Spaces, *rows: int) -> dict[str, Tensor]:
    return {key: draw(space, *rows) for key, space in spaces.observations.items()}


@pytest.fixture
def spaces() -> Spaces:
    return Spaces(observations=EVERYTHING, action=FOUR)


@pytest.fixture
def batch_of(make_batch):
    def make(spaces: Spaces, **sizes) -> Batch:
        batch = make_batch(spaces, **sizes)
        return replace(batch, obs=observations(spaces, *batch.time_idx.shape))

    return make


# ------------------------------------------------------------------------------- recognised, named


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (ObsSpace(shape=(84, 84, 4), dtype="uint8"), "image"),
        (ObsSpace(shape=(3, 64, 64), dtype="uint8"), "image"),
        (ObsSpace(shape=(7, 7, 3), dtype="uint8"), "image"),
        (ObsSpace(shape=(84, 84), dtype="uint8"), "image"),
        (ObsSpace(shape=(3, 3, 1), dtype="uint8"), "vector"),
        (ObsSpace(shape=(128,), dtype="uint8"), "vector"),
        (ObsSpace(shape=(8, 8, 3), dtype="float32"), "vector"),
        (ObsSpace(shape=(), dtype="int64", n=128), "vector"),
        (ObsSpace(shape=(), dtype="int64", n=129), "tokens"),
        (ObsSpace(shape=(9,), dtype="int64", n=64), "tokens"),
        (ObsSpace(shape=(4,), dtype="int64", n=3), "vector"),
        (ObsSpace(shape=(9,), dtype="int32"), "vector"),
        (ObsSpace(shape=(5, 2), dtype="float32"), "vector"),
    ],
)
def test_what_a_space_is_taken_for(space: ObsSpace, kind: str) -> None:
    assert modalities_of(TimestepEncoderConfig(), spaces_of(x=space)) == {"x": kind}


def test_names_go_before_looks(spaces: Spaces) -> None:
    """Each kind can be given to a key, and the description says what came of it."""
    config = SMALL.replace(vector_keys=("items", "mission"))
    kinds = modalities_of(config, spaces)
    assert kinds["items"] == kinds["mission"] == "vector"
    assert (kinds["float_image"], kinds["words"], kinds["goals"]) == ("image", "tokens", "goals")
    said = TimestepEncoder(config, spaces).describe()
    assert [line.split(":")[0] for line in said] == sorted(EVERYTHING)
    assert "camera/left: image 8 x 6 x 3, channels last, gridworld" in said
    assert "words: 6 tokens of 30" in said
    assert "goals: 3 goals of 2" in said
    assert "items: 189 numbers" in said  # named, so there is nothing to advise
    left = TimestepEncoder(TimestepEncoderConfig(), spaces).describe()
    assert "float_image: 50 numbers, if it is an image, name it in images.keys" in left


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"keys": ("nose",)}, r"keys: 'nose' is not an observation with the role 'policy'"),
        ({"keys": ("type",), "hide_keys": ("items",)}, r"hide_keys: 'items' is not .*\['type'\]"),
        ({"images": PlainImageConfig(keys=("nose",))}, "images.keys: 'nose' is not"),
        ({"vector_keys": ("nose",)}, "vector_keys: 'nose' is not"),
        (
            {"tokens": TokenConfig(keys=("type",))},
            "'type' has dtype float32, but tokens are integers",
        ),
        ({"tokens": TokenConfig(padding=300)}, "padding: 300 is no token of 'mission'.* 0 to 39"),
        ({"goals": GoalConfig(keys=("type",))}, r"goals.*'type' has shape \(4,\)|GoalConfig.keys"),
        (
            {"images": PlainImageConfig(keys=("type",))},
            r"'type': expected an image .* not shape \(4,\)",
        ),
    ],
)
def test_settings_that_fit_nothing_are_refused_by_name(spaces, changes: dict, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TimestepEncoder(TimestepEncoderConfig(**changes), spaces)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"keys": ("type",), "images": PlainImageConfig(d_output=3)}, ["timestep_encoder.images"]),
        ({"keys": ("type",), "tokens": TokenConfig(d_hidden=3)}, ["timestep_encoder.tokens"]),
        ({"goals": GoalConfig(d_output=3)}, ["timestep_encoder.goals"]),
        ({"keys": ("place",), "differences": True}, ["timestep_encoder.differences=True"]),
        ({"differences": True}, []),
        ({"d_hidden": 3}, []),
    ],
)
def test_settings_of_observations_that_do_not_occur_are_told(
    spaces, changes: dict, named: list[str]
) -> None:
    config = AgentConfig(timestep_encoder=TimestepEncoderConfig(**changes))
    assert unused_settings(config, spaces) == named


def test_the_encoder_of_one_image_and_samples_of_discrete_actions_may_be_without_use(
    spaces,
) -> None:
    losses = LossConfig(n_actions_in_actor_loss=2)
    config = AgentConfig(timestep_encoder=ImageTimestepEncoderConfig(), losses=losses)
    found = unused_settings(config, spaces)
    assert found == ["losses.n_actions_in_actor_loss=2", "timestep_encoder.kind='image'"]
    assert not unused_settings(AgentConfig(losses=losses, algorithm="multitask"), spaces)


def test_a_key_has_one_kind() -> None:
    with pytest.raises(ConfigError, match=r"vector_keys: 'x' is in images.keys already"):
        TimestepEncoderConfig(images=PlainImageConfig(keys=("x",)), vector_keys=("x",))


# ------------------------------------------------------------------------------------ what it makes


def test_plain_observations_have_the_plain_encoder_and_nothing_more() -> None:
    """The names, the number of parameters and the numbers of whiten → MLP → norm."""
    spaces = spaces_of(b=ObsSpace(shape=(3,), dtype="float32"), a=EVERYTHING["few"])
    made = TimestepEncoder(TimestepEncoderConfig(d_hidden=16, d_output=12), spaces).eval()
    width = 3 + 3 + 1 + 4
    assert {name.split(".")[0] for name in made.state_dict()} == {"input_norm", "mlp", "out_norm"}
    counted = sum(p.numel() for p in made.parameters())
    assert counted == (width + 1) * 16 + 17 * 16 + 17 * 12 + 2 * 12
    obs, previous = observations(spaces, 2, 5), torch.randn(2, 5, 5)
    x = torch.cat((F.one_hot(obs["a"], 3).float(), obs["b"], previous), -1)
    x = x / (1 + 1e-5) ** 0.5  # statistics at birth
    expected = F.layer_norm(made.mlp(x), (12,))
    torch.testing.assert_close(made(obs, previous, None), expected)


def test_categories_are_one_hot_bytes_are_shares_and_numbers_are_themselves() -> None:
    """A category declared as a number is one."""
    x = torch.tensor([[2, 0]])
    category, byte = ObsSpace(shape=(), dtype="int64", n=3), ObsSpace(shape=(), dtype="uint8")
    assert vector_features(category, x).tolist() == [[[0, 0, 1], [1, 0, 0]]]
    shares = vector_features(byte, x.to(torch.uint8) * 51)
    torch.testing.assert_close(shares, torch.tensor([[[0.4], [0.0]]]))
    number = ObsSpace(shape=(), dtype="float32")
    assert vector_features(number, x.float()).tolist() == [[[2], [0]]]


def test_the_order_of_the_dict_does_not_matter(spaces: Spaces) -> None:
    """Neither of the spaces nor of the observations: weights and outputs are the same."""
    turned = Spaces(observations=dict(reversed(EVERYTHING.items())), action=FOUR)
    obs, previous = observations(spaces, 2, 3), torch.randn(2, 3, 5)
    outputs = []
    for some, rows in ((spaces, obs), (turned, dict(reversed(obs.items())))):
        torch.manual_seed(1)
        outputs.append(TimestepEncoder(SMALL, some).eval()(rows, previous, None))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("images", [0, 1, 4])
def test_any_number_of_images(images: int, batch_of, make_config) -> None:
    """Each has a network of its own, and the loss reaches all of them."""
    keys = {f"eye{i}": IMAGE.replace(shape=(6 + i, 7, 3)) for i in range(images)}
    spaces = spaces_of(**keys, body=ObsSpace(shape=(2,), dtype="float32"))
    agent = Agent(make_config(encoder=TimestepEncoderConfig(d_hidden=16, d_output=12)), spaces)
    agent(batch_of(spaces))[0].backward()
    rows = agent.policy.timestep_encoder
    assert rows.observations.n_images == images
    for parameter in rows.parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def test_the_loss_reaches_every_embedder(spaces, batch_of, make_config) -> None:
    agent = Agent(make_config(encoder=SMALL), spaces)
    agent(batch_of(spaces))[0].backward()
    for name, parameter in agent.policy.timestep_encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", ["auto", "impala"])
def test_row_by_row_is_what_the_window_gives(spaces, batch_of, make_config, kind: str) -> None:
    """The whole policy, each step with a memory, one row at a time and all at once."""
    encoder = SMALL.replace(
        images=configured(
            timestep_encoder={
                "images": {
                    "kind": kind,
                    "d_output": SMALL.images.d_output,
                    "augment": {"share": 0.9, "shift": 2},
                }
            }
        ).timestep_encoder.images
    )
    gru = GRUConfig()
    agent = Agent(make_config(gru, encoder=encoder), spaces)
    policy = agent.policy
    batch = batch_of(spaces, lengths=(6, 6), first=0)
    with torch.no_grad():
        agent(batch)  # statistics move
        agent.eval()
        inputs = batch.prev_action, batch.prev_reward, batch.time_idx
        rows = policy.encode_timesteps(batch.obs, *inputs, valid=batch.timestep_mask)
        whole = policy.encode_trajectory(rows, batch.time_idx)
        hidden = policy.initial_hidden(2)
        for t in range(6):  # row 6 of the second window was never recorded
            now = slice(t, t + 1)
            row = policy.encode_timesteps(
                {key: x[:, now] for key, x in batch.obs.items()}, *(x[:, now] for x in inputs)
            )
            state, hidden = policy.trajectory_encoder.step(row, batch.time_idx[:, now], hidden)
            torch.testing.assert_close(state, whole[:, now], rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing(spaces, batch_of, make_config) -> None:
    """Junk behind the mask, and more of it: same loss, statistics and gradients, also shifted."""
    encoder = SMALL.replace(images=SMALL.images.replace(augment=AugmentConfig(share=0.7, shift=3)))
    batch = batch_of(spaces)

    def junk(x: Tensor) -> Tensor:
        return torch.full_like(x, float("nan") if x.is_floating_point() else 113)

    def padded(x: Tensor, rows: Tensor) -> Tensor:
        keep = rows.reshape(*rows.shape, *[1] * (x.ndim - 2))
        return torch.cat((torch.where(keep, x, junk(x)), junk(x[:, :2])), dim=1)

    obs = {key: padded(x, batch.timestep_mask) for key, x in batch.obs.items()}
    more = {
        f.name: F.pad(
            getattr(batch, f.name), [0] * (2 * (getattr(batch, f.name).ndim - 2)) + [0, 2]
        )
        for f in dataclasses.fields(batch)
        if isinstance(getattr(batch, f.name), Tensor)
    }
    results = []
    for some in (batch, replace(batch, obs=obs, **more)):
        torch.manual_seed(5)
        agent = Agent(make_config(encoder=encoder), spaces)
        torch.manual_seed(6)
        loss, _ = agent(some)
        loss.backward()
        gradients = {n: p.grad for n, p in agent.named_parameters() if p.grad is not None}
        results.append((loss, gradients, dict(agent.named_buffers())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_shifts_happen_in_training_only(spaces, batch_of, make_config) -> None:
    """Two training passes differ by the shifts; evaluation, values and acting are still."""
    encoder = SMALL.replace(images=SMALL.images.replace(augment=AugmentConfig(share=1.0, shift=3)))
    plain, shifted = (Agent(make_config(encoder=e), spaces) for e in (SMALL, encoder))
    shifted.load_state_dict(plain.state_dict())
    batch = batch_of(spaces)

    def rows(agent: Agent, training: bool) -> Tensor:
        torch.manual_seed(7)
        encoder = agent.train(training).policy.timestep_encoder
        previous = torch.zeros(*batch.time_idx.shape, 5)
        return encoder(batch.obs, previous, batch.timestep_mask).detach()

    assert torch.equal(rows(plain, False), rows(shifted, False))
    assert not torch.allclose(rows(plain, True), rows(shifted, True))
    shifted.load_state_dict(plain.state_dict())
    for field in ("q", "advantage"):
        of_plain, of_shifted = (getattr(get_values(a, batch), field) for a in (plain, shifted))
        assert torch.equal(of_plain, of_shifted)
    assert shifted.training


def test_hidden_observations_leave_nothing_but_their_parameters(
    spaces, batch_of, make_config
) -> None:
    """The output is the same whatever they are; every parameter still has a gradient, of zero."""
    hidden = ("camera/left", "mission", "goals", "type", "few")
    agent = Agent(make_config(encoder=SMALL.replace(hide_keys=hidden)), spaces)
    shown = Agent(make_config(encoder=SMALL), spaces)
    assert agent.state_dict().keys() == shown.state_dict().keys()
    rows, obs, previous = (
        agent.policy.timestep_encoder,
        observations(spaces, 2, 3),
        torch.ones(2, 3, 5),
    )
    other = observations(spaces, 2, 3)
    changed = {key: other[key] if key in hidden else x for key, x in obs.items()}
    rows.eval()
    assert torch.equal(rows(obs, previous, None), rows(changed, previous, None))
    assert not torch.equal(
        rows(obs, previous, None), rows(obs | {"items": other["items"]}, previous, None)
    )
    agent.train()(batch_of(spaces))[0].backward()
    assert all(p.grad is not None for p in rows.parameters())
    assert next(rows.observations.encoders[-1].parameters()).grad.abs().sum() == 0


def test_what_was_done_and_earned_can_be_hidden(spaces) -> None:
    """All of it, or the reward alone; with images beside it, too."""
    obs, previous = observations(spaces, 2, 3), torch.randn(2, 3, 5)
    paid = torch.cat((previous[..., :1] + 1, previous[..., 1:]), -1)
    done = torch.cat((previous[..., :1], previous[..., 1:] + 1), -1)
    for changes, blind in (
        ({}, (False, False)),
        ({"hide_reward": True}, (True, False)),
        ({"hide_previous": True}, (True, True)),
    ):
        rows = TimestepEncoder(SMALL.replace(**changes), spaces).eval()
        same = tuple(
            torch.equal(rows(obs, previous, None), rows(obs, x, None)) for x in (paid, done)
        )
        assert same == blind


def test_auto_scale_widens_to_the_input() -> None:
    spaces = spaces_of(x=ObsSpace(shape=(60,), dtype="float32"), eye=IMAGE)
    config = TimestepEncoderConfig(
        d_hidden=16, d_output=200, auto_scale=True, images=PlainImageConfig(d_output=10)
    )
    width = 60 + 1 + 4 + 10
    made = TimestepEncoder(config, spaces)
    assert (made.mlp[0].in_features, made.mlp[0].out_features) == (width, width)
    assert made.d_output == made.mlp[-1].out_features == 200
    assert TimestepEncoder(config.replace(d_output=8), spaces).d_output == width


@pytest.mark.parametrize(("norm", "name"), [("norm", "d_hidden"), ("out_norm", "d_output")])
def test_a_width_that_auto_scale_makes_and_a_norm_cannot_take_is_refused_by_name(
    norm: str, name: str
) -> None:
    spaces = spaces_of(x=ObsSpace(shape=(40,), dtype="float32"))  # 45 with the previous step
    config = TimestepEncoderConfig(d_hidden=64, d_output=64, auto_scale=True, **{norm: "simnorm"})
    narrow = config.replace(**{name: 16})
    says = rf"TimestepEncoderConfig\.{norm}: 'simnorm'.*{name}=16 to 45.*set {name} to 48"
    with pytest.raises(ConfigError, match=says):
        TimestepEncoder(narrow, spaces)
    for fits in (config, narrow.replace(**{name: 48}), narrow.replace(auto_scale=False)):
        TimestepEncoder(fits, spaces)


def test_a_policy_file_brings_everything_back(spaces, batch_of, make_config) -> None:
    encoder = SMALL.replace(
        hide_keys=("few",),
        vector_keys=("items",),
        auto_scale=True,
        images=ImpalaImageConfig(
            keys=("float_image",),
            channels="last",
            block_depths=(4, 8),
            norm="layer",
            group_norm=False,
            augment=AugmentConfig(share=0.5, shift=2),
        ),
    )
    agent = Agent(make_config(encoder=encoder), spaces)
    agent(batch_of(spaces))
    loaded = load_policy(save_policy(agent))
    assert loaded.config == agent.config
    obs = observations(spaces, 5)
    inputs = torch.zeros(5, dtype=torch.int64), torch.zeros(5), torch.zeros(5, dtype=torch.int64)
    actions = [
        policy.act(obs, *inputs, policy.initial_hidden(5), sample=False)[0]
        for policy in (agent.policy.eval(), loaded)
    ]
    assert torch.equal(*actions)
    previous = torch.zeros(5, 1, 5)
    rows = {key: x.unsqueeze(1) for key, x in obs.items()}
    assert torch.equal(
        agent.policy.timestep_encoder(rows, previous, None),
        loaded.timestep_encoder(rows, previous, None),
    )


def test_an_image_of_another_shape_is_refused(spaces, batch_of, make_config) -> None:
    agent, batch = Agent(make_config(encoder=SMALL), spaces), batch_of(spaces)
    batch.obs["items"] = batch.obs["items"].transpose(-1, -2)
    with pytest.raises(BatchError, match=r"obs\['items'\]: expected shape"):
        agent(batch)


# ------------------------------------------------------------------------------------------- tokens


def tokens(shape: tuple[int, ...], **settings):
    space = ObsSpace(shape=shape, dtype="int64")
    config = TokenConfig(vocabulary=10, padding=0, **settings)
    embed = TokenEncoder(config, "words", space)
    return lambda *rows: embed(torch.tensor([rows])).squeeze(0)


def test_a_sentence_is_what_is_present_of_it() -> None:
    """Padding and numbers below the vocabulary count for nothing, wherever they are."""
    left, right, between, other, empty, nothing = tokens((4,))(
        [0, 0, 3, 7], [3, 7, 0, 0], [3, -5, 0, 7], [7, 3, 0, 0], [0, 0, 0, 0], [-1, -1, -1, 0]
    )
    torch.testing.assert_close(left, right)
    torch.testing.assert_close(left, between)
    torch.testing.assert_close(empty, nothing)
    assert not torch.allclose(left, other)
    assert not torch.allclose(left, empty)


def test_a_text_is_tokens_padded_with_0() -> None:
    """However small it is, and whatever the settings say of other tokens."""
    space = ObsSpace(shape=(4,), dtype="int64", n=5, vocabulary=("a", "b", "c"))
    spaces = Spaces(observations={"text": space}, action=ActionSpace(kind="discrete", n=2))
    assert modalities_of(TimestepEncoderConfig(raw_numbers=True), spaces) == {"text": "tokens"}
    embed = TokenEncoder(TokenConfig(padding=3), "text", space)
    left, right, other = embed(torch.tensor([[[3, 4, 0, 0], [0, 0, 3, 4], [4, 3, 0, 0]]]))[0]
    torch.testing.assert_close(left, right)
    assert not torch.allclose(left, other)


def test_a_sentence_is_read_as_the_recurrence_says() -> None:
    embed = TokenEncoder(TokenConfig(), "words", ObsSpace(shape=(3,), dtype="int64", n=9))
    rnn, state = embed.recurrent, torch.zeros(64)
    for number in (4, 8, 4):
        x = embed.embedding.weight[number]
        state = torch.tanh(
            rnn.weight_ih_l0 @ x + rnn.bias_ih_l0 + rnn.weight_hh_l0 @ state + rnn.bias_hh_l0
        )
    torch.testing.assert_close(embed(torch.tensor([[[4, 8, 4]]]))[0, 0], embed.out(state))
    nothing = embed(torch.tensor([[[-1, -1, -1]]]))[0, 0]
    torch.testing.assert_close(nothing, embed.out(torch.zeros(64)))


def test_choices_that_do_not_begin_at_0_are_encoded_as_those_that_do() -> None:
    """As one-hots and as tokens, in the environment's own numbers, padding too."""
    plain = ObsSpace(shape=(2,), dtype="int64", n=9)
    moved = ObsSpace(shape=(2,), dtype="int64", n=9, starts=(-4, 5))
    x = torch.tensor([[[0, 8], [3, 2], [8, 0]]])
    own = x + torch.tensor([-4, 5])
    torch.testing.assert_close(vector_features(moved, own), vector_features(plain, x))
    assert int(vector_features(moved, own).sum()) == 6
    assert int(vector_features(moved, torch.zeros_like(x)).sum()) == 3  # 0 is no choice of part 1
    torch.manual_seed(0)
    embed = TokenEncoder(TokenConfig(), "words", plain)
    other = TokenEncoder(TokenConfig(), "words", moved)
    other.load_state_dict(embed.state_dict())
    torch.testing.assert_close(other(own), embed(x))
    other(torch.zeros_like(x))  # rows without a step
    padded = TokenEncoder(TokenConfig(padding=-4), "words", moved)
    same = TokenEncoder(TokenConfig(padding=5), "words", moved)
    absent = torch.tensor([[[-4, 6]]]), torch.tensor([[[-9, 6]]])  # numbers below are padding
    torch.testing.assert_close(padded(absent[0]), padded(absent[1]))
    assert not torch.allclose(same(absent[0]), same(absent[1]))
    with pytest.raises(ConfigError, match="which has -4 to 13"):
        TokenEncoder(TokenConfig(padding=14), "words", moved)


@pytest.mark.parametrize("shape", [(), (2,)])
def test_numbers_beyond_the_vocabulary_are_one_unknown_token(shape: tuple[int, ...]) -> None:
    embed = tokens(shape)

    def filled(number: int) -> list[int] | int:
        return [number] * 2 if shape else number

    known, unknown, other, none = embed(filled(9), filled(10), filled(999), filled(0))
    torch.testing.assert_close(unknown, other)
    assert not torch.allclose(known, unknown)
    assert not torch.allclose(none, unknown)


def test_lowest_counts_from_below_zero() -> None:
    """As lists of goals do that mark "done" and "none" by negative numbers."""
    first, second, below = tokens((2, 2), lowest=-3)(
        [[-3, 1], [6, 2]], [[-2, 1], [6, 2]], [[-4, 1], [6, 2]]
    )
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, below)


def test_goals_are_embedded_by_two_linear_layers_and_a_norm() -> None:
    embed = GoalEncoder(GoalConfig(), "goals", EVERYTHING["goals"])
    assert sum(p.numel() for p in embed.parameters()) == 6 * 4 + 4 + 4 * 32 + 32 + 2 * 32
    x = torch.randn(1, 1, 3, 2)
    hidden = F.leaky_relu(embed.net[0](x.flatten()), 0.01)
    torch.testing.assert_close(embed(x)[0, 0], F.layer_norm(embed.net[2](hidden), (32,)))


# ------------------------------------------------------------------------------------- learning


def quiz(questions: int) -> Batch:
    """One step each: is the lit half of the image (left, right) the one that the word names?

    Both answers are given at random and earn 1 or 0, so the image or the word alone earns a half.
    """
    side, word, answer = torch.randint(0, 2, (3, questions))
    image = torch.randint(0, 40, (questions, 2, 5, 8, 1), dtype=torch.uint8)
    image[side == 0, :, :, :4] += 200
    image[side == 1, :, :, 4:] += 200
    sentence = torch.tensor([[7, 3, 0], [5, 0, 0]])[word]
    flags = torch.ones(questions, 1, dtype=torch.bool)
    return Batch(
        obs={"image": image, "sentence": sentence[:, None].expand(-1, 2, -1)},
        prev_action=torch.stack((torch.zeros_like(answer), answer), dim=1),
        prev_reward=torch.stack(
            (torch.zeros(questions), ((side == word) == answer).float()), dim=1
        ),
        time_idx=torch.arange(2).expand(questions, -1),
        terminated=flags,
        truncated=~flags,
        next_obs_valid=~flags,
        mask=flags,
        action_known=flags,
    )


@pytest.mark.parametrize(
    ("hidden", "least", "most"),
    [((), 0.95, 1.0), (("image",), 0.3, 0.7), (("sentence",), 0.3, 0.7)],
)
def test_the_image_and_the_sentence_are_used_together(make_config, hidden, least, most) -> None:
    """From random answers; an agent that is blind to either of them guesses."""
    spaces = Spaces(
        observations={
            "image": ObsSpace(shape=(5, 8, 1), dtype="uint8"),
            "sentence": ObsSpace(shape=(3,), dtype="int64", n=60),
        },
        action=ActionSpace(kind="discrete", n=2),
    )
    encoder = TimestepEncoderConfig(
        d_hidden=32, d_output=32, hide_keys=hidden, images=PlainImageConfig(d_output=16)
    )
    losses = {"dpg_weight": 0.0, "bc_weight": 1.0, "auxiliary_gammas": ()}
    agent = Agent(make_config(encoder=encoder, losses=losses), spaces)
    optimizer = torch.optim.AdamW(agent.trainable_parameters(), lr=5e-3)
    for _ in range(60):
        loss, _ = agent(quiz(64), detailed=False)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.trainable_parameters(), 1.0)
        optimizer.step()
        agent.update_targets()
    asked = quiz(400)
    obs = {key: x[:, 0] for key, x in asked.obs.items()}
    nothing = torch.zeros(400, dtype=torch.int64)
    answers, _ = agent.eval().policy.act(obs, nothing, nothing.float(), nothing, None, sample=False)
    right = (answers == asked.action[:, 0]) == (asked.reward[:, 0] == 1)
    assert least <= right.float().mean() <= most
