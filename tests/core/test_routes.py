"""Routes of tokens through mixtures of experts: how they are stored, joined, and divided with their tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.core import routes
from covey.core.batch import collate, join
from covey.core.records import FinishReason, Rollout
from covey.core.routes import RouteShape
from covey.core.strands import unfolded
from covey.trainer.distributed.exchange import RolloutIndex, join_indexes

SHAPE = RouteShape(layers=(1, 2), hidden_layers=3, experts=8, top_k=2)


def path(*numbers):
    """Routes of as many tokens, in two layers with two experts: [n, n + 1] and [n + 2, n + 3] modulo 8."""
    ids = [[[n % 8, (n + 1) % 8], [(n + 2) % 8, (n + 3) % 8]] for n in numbers]
    return torch.tensor(ids, dtype=torch.uint8).view(-1, 2, 2)


def rollout(prompt, completion, routed=None, **changes):
    size = len(completion)
    return Rollout(prompt, completion, [True] * size, None, "", FinishReason.STOP, routes=routed, **changes)


def firsts(stored):
    """The first expert of each token, by which `path` tells them apart; None where it is not known."""
    known = routes.are_known(stored).tolist()
    return [one if is_known else None for one, is_known in zip(stored[:, 0, 0].tolist(), known, strict=True)]


def test_256_experts_need_two_bytes():
    assert [replace_experts(count).dtype for count in (255, 256)] == [torch.uint8, torch.int16]
    assert [replace_experts(count).nbytes for count in (255, 256)] == [4, 8]


def replace_experts(count):
    return SHAPE._replace(experts=count)


def test_a_servers_experts_of_all_layers_are_those_of_layers_with_a_router():
    ids = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 8
    assert SHAPE.of_server(ids).tolist() == ids[:, 1:].tolist()
    assert SHAPE.of_server(ids[:, 1:]).tolist() == ids[:, 1:].tolist()


@pytest.mark.parametrize("shape", [(5, 4, 2), (5, 3, 1), (5, 6)])
def test_experts_of_another_model_are_refused(shape):
    with pytest.raises(ValueError, match="2 layers with a router among 3"):
        SHAPE.of_server(np.zeros(shape, dtype=np.int32))


@pytest.mark.parametrize("expert", [8, -1])
def test_experts_that_there_are_not_are_refused(expert):
    with pytest.raises(ValueError, match=f"expert {expert}"):
        SHAPE.of_server(np.full((1, 2, 2), expert))


def test_a_token_keeps_the_route_that_it_was_first_computed_with():
    assert firsts(routes.continued(path(1, 2), path(5, 5, 3, 4))) == [1, 2, 3, 4]
    assert firsts(routes.continued(None, path(5))) == [5]


def test_experts_differ_whatever_their_order():
    own = torch.tensor([[[0, 1]], [[0, 1]], [[0, 1]]], dtype=torch.uint8)
    others = torch.tensor([[[1, 0]], [[1, 2]], [[255, 255]]], dtype=torch.uint8)
    assert routes.differing(own, others).tolist() == [[False], [True], [False]]


def test_routes_are_written_and_read():
    assert torch.equal(torch.from_numpy(routes.read_bytes(routes.to_bytes(path(1, 2)))), path(1, 2))
    with pytest.raises(ValueError, match="no NumPy array"):
        routes.read_bytes(b"none")


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_the_last_token_has_no_route():
    batch = collate([rollout([5, 6], [7, 8, 9], path(0, 1, 2, 3))])
    assert firsts(batch.prompt_routes) == [0, 1]
    assert firsts(batch.routes) == [2, 3, None]


def test_prompts_of_other_routes_are_distinct():
    batch = collate(
        [
            rollout([5, 6], [7], path(0, 1)),
            rollout([5, 6], [8], path(0, 1)),
            rollout([5, 6], [9], path(0, 4)),
        ]
    )
    assert batch.groups.tolist() == [0, 0, 1]
    assert batch.prompt_ids.tolist() == [5, 6, 5, 6]
    assert firsts(batch.prompt_routes) == [0, 1, 0, 4]
    plain = batch.unrouted()
    assert (plain.groups.tolist(), plain.prompt_ids.tolist(), plain.routes) == ([0, 0, 0], [5, 6], None)


def test_routes_stay_with_their_tokens():
    rollouts = [
        rollout([5], [7, 8], path(0, 1)),
        rollout([6, 6], [9], path(2, 3)),
        rollout([5], [], None),
        rollout([5], [4, 4, 4], path(0, 6, 7)),
    ]
    batch = collate(rollouts)
    chosen = batch.select(torch.tensor([3, 1]))
    assert firsts(chosen.routes) == [6, 7, None, None]
    assert [firsts(one) for one in chosen.routes_of_prompts()] == [[2, 3], [0]] or [
        firsts(one) for one in chosen.routes_of_prompts()
    ] == [[0], [2, 3]]
    parts = [batch.select(torch.tensor([row])) for row in range(4)]
    again = join(parts)
    for name in ("token_ids", "routes", "prompt_ids", "prompt_routes", "groups"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    state = batch.state()
    assert torch.equal(type(batch).of_state(state).prompt_routes, batch.prompt_routes)


def test_a_batch_without_routes_joins_others_with_unknown_ones():
    batch = join([collate([rollout([5], [7], path(1))]), collate([rollout([5], [8])])])
    assert firsts(batch.routes) == [None, None]
    assert batch.groups.tolist() == [0, 1], "a prompt that is free to choose is another one"
    assert firsts(batch.prompt_routes) == [1, None]


def test_an_idle_rollout_is_free_to_choose():
    idle = collate([rollout([5], [7], path(1))]).idle()
    assert firsts(idle.routes) == firsts(idle.prompt_routes) == [None]


def test_too_many_routes_are_refused():
    with pytest.raises(ValueError, match="routes of 4 tokens"):
        rollout([5], [7, 8], path(0, 1, 2, 3))


def test_processes_tell_prompts_of_other_routes_apart():
    credited = [replace(collate([rollout([5, 6], [7], path(0, last))]), advantages=torch.ones(1)) for last in (1, 1, 4)]
    index = join_indexes([RolloutIndex.of(batch, rank) for rank, batch in enumerate(credited)])
    assert index.groups.tolist() == [0, 0, 1]


def test_strands_repeat_the_routes_of_the_tokens_that_they_share():
    # The prompt 1 2, the answer 3 4; then 9 5 after the prompt's first token, and 6 7 after nothing.
    given = rollout([1, 2], [3, 4, 9, 5, 6, 7], path(*range(8)), strands=[(2, 0), (4, -1)])
    rows, owners, tokens = unfolded(collate([given]))
    assert owners.tolist() == [0, 0, 0]
    assert [row.tolist() for row in rows.prompts()] == [[1, 2], [1], [6]]
    assert [firsts(one) for one in rows.routes_of_prompts()] == [[0, 1], [0], [6]]
    assert [row.tolist() for row in rows.completions()] == [[3, 4], [9, 5], [7]]
    assert firsts(rows.routes) == [2, 3, 4, 5, 7]
    assert tokens.tolist() == [0, 1, 2, 3, 5]
