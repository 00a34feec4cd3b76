"""The batch's shapes, and the one encoding of actions and of the previous step."""

from __future__ import annotations

import pytest
import torch

from amago_model import ActionSpace, BatchError, decode_action, encode_action, previous_features

DISCRETE = ActionSpace(kind="discrete", n=4, start=3)
BOX = ActionSpace(kind="continuous", shape=(2,), low=(-2.0, 0.0), high=(2.0, 1.0))


def test_discrete_actions_are_one_hot_from_the_space_s_first_number() -> None:
    encoded = encode_action(DISCRETE, torch.tensor([3, 6, -1]))
    assert encoded.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert decode_action(DISCRETE, encoded[:2].argmax(-1)).tolist() == [3, 6]


def test_continuous_actions_span_minus_one_to_one_and_come_back() -> None:
    action = torch.tensor([[-2.0, 0.0], [2.0, 1.0], [1.0, 0.25], [9.0, -9.0]])
    encoded = encode_action(BOX, action)
    torch.testing.assert_close(
        encoded, torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.5, -0.5], [1.0, -1.0]])
    )
    torch.testing.assert_close(decode_action(BOX, encoded[:3]), action[:3])


def test_decoded_actions_never_leave_the_box() -> None:
    space = ActionSpace(kind="continuous", shape=(3,), low=(-0.1, 0.3, -7.7), high=(0.7, 0.9, 1.1))
    x = torch.cat((torch.linspace(-1, 1, 4001), torch.tensor([-5.0, 5.0]))).unsqueeze(-1)
    action = decode_action(space, x.expand(-1, 3))
    assert bool(
        (action >= torch.tensor(space.low)).all() & (action <= torch.tensor(space.high)).all()
    )


def test_matrix_shaped_actions_are_flattened_and_restored() -> None:
    space = ActionSpace(kind="continuous", shape=(2, 2), low=(-1.0,) * 4, high=(3.0,) * 4)
    action = torch.rand(5, 7, 2, 2) * 4 - 1
    assert encode_action(space, action).shape == (5, 7, 4)
    torch.testing.assert_close(decode_action(space, encode_action(space, action)), action)


def test_the_previous_step_is_reward_then_action_and_nothing_at_time_zero(make_spaces) -> None:
    spaces = make_spaces("discrete")  # 4 actions numbered from 1
    prev_action = torch.tensor([[99, 2, 4]])
    prev_reward = torch.tensor([[torch.nan, 0.5, -3.0]])
    features = previous_features(spaces, prev_action, prev_reward, torch.tensor([[0, 1, 2]]))
    assert features.tolist() == [[[0, 0, 0, 0, 0], [0.5, 0, 1, 0, 0], [-3, 0, 0, 0, 1]]]


def test_an_unknown_previous_action_shows_as_zeros_beside_its_reward(make_spaces) -> None:
    spaces = make_spaces("continuous")
    prev_action = torch.full((1, 2, 2), torch.nan)
    features = previous_features(
        spaces,
        prev_action,
        torch.ones(1, 2),
        torch.tensor([[4, 5]]),
        known=torch.zeros(1, 2, dtype=torch.bool),
    )
    assert features.tolist() == [[[1, 0, 0], [1, 0, 0]]]


def test_action_and_reward_are_the_previous_columns_one_row_later(make_spaces, make_batch) -> None:
    batch = make_batch(make_spaces("continuous"))
    assert batch.action.shape == (3, 6, 2) and batch.reward.shape == (3, 6)
    torch.testing.assert_close(batch.action[:, 2], batch.prev_action[:, 3])
    torch.testing.assert_close(batch.reward[:, 0], batch.prev_reward[:, 1])


def test_rows_are_valid_where_an_observation_was_recorded(make_spaces, make_batch) -> None:
    batch = make_batch(make_spaces(), lengths=(2, 2, 1, 0), size=2)
    # A whole window; one whose last observation is missing; one that ended; one of padding only.
    assert batch.timestep_mask.tolist() == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [False, False, False],
    ]


def test_moving_a_batch_moves_every_tensor(make_spaces, make_batch) -> None:
    batch = make_batch(make_spaces())
    assert batch.to("meta").actor_mask is None
    batch.actor_mask, batch.critic_mask = batch.mask.clone(), batch.mask.clone()
    moved = batch.to("meta")
    tensors = (moved.obs["observation"], moved.mask, moved.actor_mask, moved.critic_mask)
    assert {x.device.type for x in tensors} == {"meta"}
    assert batch.padded(9).critic_mask.shape == (3, 9)
    assert torch.equal(batch.windows(1, 3).actor_mask, batch.mask[1:3])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prev_reward", torch.zeros(3, 6), r"prev_reward: expected shape \[3, 7\], got \[3, 6\]"),
        ("prev_action", torch.zeros(3, 7, 4), r"prev_action: expected shape \[3, 7\]"),
        ("mask", torch.zeros(3), "mask"),
        ("terminated", torch.zeros(3, 6), "terminated: expected bool"),
        ("actor_mask", torch.ones(3, 6), "actor_mask: expected bool"),
        ("critic_mask", torch.ones(3, 7) > 0, r"critic_mask: expected shape \[3, 6\]"),
        ("obs", {"pixels": torch.zeros(3, 7, 3)}, "'observation' is missing"),
        ("obs", {"observation": torch.zeros(3, 7, 4)}, r"expected shape \[3, 7, 3\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_field(
    make_spaces, make_batch, field: str, value, words: str
) -> None:
    batch = make_batch(make_spaces())
    setattr(batch, field, value)
    with pytest.raises(BatchError, match=words):
        batch.check(make_spaces())
