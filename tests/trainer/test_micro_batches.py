"""Passes: memory that runs out costs time and nothing else."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

from covey.core.batch import collate
from covey.core.packing import derived_budget
from covey.core.records import FinishReason, Rollout
from covey.trainer.distributed.sharding import Sharding
from covey.trainer.microbatches import MicroBatchRunner, nominal_parts, spread
from tests.support import runs, tiny
from tests.support.exact import KeepFloat64

OUT = torch.OutOfMemoryError("injected")
NO_MODEL = torch.nn.ParameterList()


def gradients_of_one_step(tmp_path, prepare=lambda trainer: None, parts=None, **changes):
    """The gradients that the optimizer is handed at step 1, in float64; zeros where there are none."""
    parts = {"model": tiny.model().double(), **(parts or {})}
    fixed = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0, "max_completion_length": 12}
    trainer = runs.trainer(tmp_path, parts=parts, **fixed, **changes)
    score = trainer.scorer._score

    def exact_score(*args, **kwargs):
        with KeepFloat64():
            return score(*args, **kwargs)

    trainer.scorer._score = exact_score
    prepare(trainer)
    seen = []

    def keep(*args):
        seen.extend(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainer.policy.parameters())

    trainer.add_callback(_Before(keep))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return trainer, seen


class _Before(TrainerCallback):
    def __init__(self, keep):
        self.keep = keep

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.keep()


def assert_equal(ours, expected):
    scale = max(grad.abs().max().item() for grad in expected)
    assert scale > 0
    assert max((a - b).abs().max().item() for a, b in zip(ours, expected, strict=True)) <= 1e-10 * scale


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return gradients_of_one_step(tmp_path_factory.mktemp("plain"))[1]


def failing(trainer, fails):
    """Make chosen forward passes of the loss run out of memory; `fails(number, batch)` says which."""
    compute, count = trainer.compute_loss, [0]

    def compute_loss(model, inputs, *args, **kwargs):
        count[0] += 1
        if fails(count[0], inputs):
            raise OUT
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        *(("shared_prefix", tokens) for tokens in (1, 40, 100, 10_000)),
        ("packed", 40),
        ("padded", 40),
        ("padded", 10_000),
    ],
)
def test_the_budget_does_not_change_the_gradient(tmp_path, expected, layout, tokens):
    _, ours = gradients_of_one_step(tmp_path, max_tokens_per_micro_batch=tokens, attn_layout=layout)
    assert_equal(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_out_of_memory_in_a_forward_pass_changes_no_gradient(tmp_path, expected, number):
    trainer, ours = gradients_of_one_step(
        tmp_path, lambda t: failing(t, lambda n, batch: n == number), max_tokens_per_micro_batch=75
    )
    assert trainer.updates.runner.limit is not None
    assert_equal(ours, expected)


def test_every_micro_batch_of_more_than_one_rollout_may_fail(tmp_path, expected):
    _, ours = gradients_of_one_step(tmp_path, lambda t: failing(t, lambda n, batch: len(batch.lengths) > 1))
    assert_equal(ours, expected)


@pytest.mark.parametrize("layers", [0, 5, 13])
def test_out_of_memory_in_a_backward_pass_leaves_no_trace(tmp_path, expected, layers):
    """The failed attempt has added to some gradients and not to others."""

    def prepare(trainer):
        done = []

        def fail(parameter):
            done.append(parameter)
            if len(done) == layers + 1:
                raise OUT

        for parameter in trainer.policy.parameters():
            parameter.register_post_accumulate_grad_hook(fail)

    _, ours = gradients_of_one_step(tmp_path, prepare, max_tokens_per_micro_batch=60)
    assert_equal(ours, expected)


@pytest.mark.slow
def test_metrics_count_a_repeated_micro_batch_once(tmp_path):
    plain, _ = gradients_of_one_step(tmp_path / "a", entropy_coef=0.1)
    failed, _ = gradients_of_one_step(tmp_path / "b", lambda t: failing(t, lambda n, b: n == 1), entropy_coef=0.1)
    for name in ("entropy", "clip_ratio/region_mean", "policy_loss", "loss", "reward"):
        assert runs.history(failed, name) == pytest.approx(runs.history(plain, name), abs=1e-6), name


@pytest.mark.slow
def test_scoring_survives_too(tmp_path):
    def prepare(trainer):
        score = trainer.updates.runner.score

        def failing_score(batch, values_of, rows):
            def values(part):
                if len(part) > 2:
                    raise MemoryError
                return values_of(part)

            return score(batch, values, rows)

        trainer.updates.runner.score = failing_score

    trainer, ours = gradients_of_one_step(tmp_path, prepare, beta=0.1)
    _, wanted = gradients_of_one_step(tmp_path / "plain", beta=0.1)
    assert trainer.updates.runner.limit is not None
    assert_equal(ours, wanted)


def batch_of(rollouts, tokens):
    """Every rollout with a prompt of its own: one token, and `tokens` to train on."""
    return collate(
        [
            Rollout([row], [2 + row] * tokens, [True] * tokens, None, "", FinishReason.STOP, group=row)
            for row in range(rollouts)
        ]
    )


def passes_over(policy=NO_MODEL, max_tokens=1000):
    config = runs.config("unused", max_tokens_per_micro_batch=max_tokens, gradient_checkpointing=False)
    run = SimpleNamespace(args=config, sharding=Sharding(), device=torch.device("cpu"), policy=policy)
    return MicroBatchRunner(run, SimpleNamespace(layout="packed"))


def size(part):
    return int(part.prompt_lengths.sum()) + part.num_tokens


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("how", ["run", "score"])
def test_what_memory_holds_is_learned_once_for_all_parts(how):
    # 64 rollouts of 8 tokens in 4 parts of 128, and memory for 20: 128, 64 and 32 fail, and then nothing does.
    batch, passes, failed = batch_of(64, 7), passes_over(max_tokens=128), []

    def values(part):
        if size(part) > 20:
            failed.append(size(part))
            raise OUT
        return part.token_ids.float()

    if how == "score":
        wide = lambda part: torch.stack([part.token_ids, part.token_ids + 1], 1)  # noqa: E731
        found = passes.score(batch, lambda part: (values(part), wide(part)), rows=4)
        assert torch.equal(found[0], batch.token_ids.float()) and torch.equal(found[1], wide(batch))
    else:
        parts = passes.plan(batch, rows=4)
        assert [size(part) for part in parts] == [128] * 4
        assert sum(passes.run(part, lambda p: values(p).sum()) for part in parts) == batch.token_ids.sum()
    assert failed == [128, 64, 32] and passes.limit == 16


class Chain(torch.nn.Sequential):
    """Five layers whose gradients are written one after the other, the last layer's first; some writings may fail."""

    def __init__(self, failures):
        torch.manual_seed(0)
        super().__init__(*(torch.nn.Linear(2, 2, bias=False) for _ in range(5)))
        self.double()
        self.failures = list(failures)  # how many gradients are written before attempts 1, 2, ... run out of memory
        self.alive = []  # gradients there at every writing
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._written)

    def _written(self, parameter):
        self.written += 1
        self.alive.append(sum(p.grad is not None for p in self.parameters()))
        if self.fails_at == self.written:
            raise OUT

    def attempt(self, part):
        self.written, self.fails_at = 0, self.failures.pop(0) if self.failures else None
        loss = self(part.token_ids.double()[:, None].expand(-1, 2)).square().sum()
        loss.backward()
        return loss.detach()

    def grads(self):
        return [parameter.grad.clone() for parameter in self.parameters()]


FAILURES = [(1, None, None), (5, None, None), (3, 1, None), (3, 5, None), (5, 3, 2), (1, 3, 4), (3, None, 2), (2, 2, 2)]


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize(
    ("before", "first", "second", "third"),
    [*((False, *one) for one in FAILURES), *((True, *one) for one in FAILURES[::3])],
)
def test_failures_in_a_repeated_micro_batch_leave_no_trace(before, first, second, third):
    """`before`: a pass that went well came first."""
    plain, chain = Chain([]), Chain([*[None] * before, first, second, third])
    batch = batch_of(8, 3)
    passes = passes_over(chain)
    for _ in range(1 + before):
        plain.attempt(batch)
        passes.run(batch, chain.attempt)
    assert passes.limit is not None
    for ours, expected in zip(chain.grads(), plain.grads(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:memory ran out")
def test_gradients_that_are_complete_are_not_held_a_second_time():
    chain = Chain([4])
    passes_over(chain).run(batch_of(2, 3), chain.attempt)
    # Beside the four that are set aside: the one just written, and the fifth parameter's once it is there.
    assert chain.alive[:4] == [1, 2, 3, 4] and max(chain.alive[4:]) == 2


def test_the_micro_batches_of_a_step_are_counted_over_its_rollout_batches(tmp_path):
    trainer = runs.trainer(
        tmp_path, gradient_accumulation_steps=4, steps_per_generation=2, max_steps=2, max_tokens_per_micro_batch=40
    )
    compute, calls = trainer.compute_loss, []
    trainer.compute_loss = lambda *args, **kwargs: calls.append(1) or compute(*args, **kwargs)
    trainer.train()
    assert sum(runs.history(trainer, "micro_batches/count")) == len(calls) >= 4


@pytest.mark.slow
def test_it_is_said_once_with_the_setting_to_use(tmp_path):
    trainer = runs.trainer(tmp_path)
    failing(trainer, lambda n, batch: n in (1, 3) and len(batch.lengths) > 1)
    with pytest.warns(UserWarning, match=r"start with max_tokens_per_micro_batch=\d+") as caught:
        trainer.train()
    assert sum("max_tokens_per_micro_batch" in str(w.message) for w in caught) == 1


def test_a_rollout_beyond_the_memory_ends_the_run_with_advice(tmp_path):
    trainer = runs.trainer(tmp_path)
    failing(trainer, lambda n, batch: True)
    with pytest.raises(torch.OutOfMemoryError, match=r"single rollout of .* gradient_checkpointing=True"):
        trainer.train()


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path):
    trainer = runs.trainer(tmp_path)

    def broken(*args, **kwargs):
        raise RuntimeError("shapes do not match")

    trainer.compute_loss = broken
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer.train()


def test_the_limit_is_kept_in_checkpoints(tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.updates.runner.limit = 17
    state = copy.deepcopy(trainer.checkpoints.method_state())
    other = runs.trainer(tmp_path / "other")
    other.checkpoints.load_method_state(state)
    assert other.updates.runner.limit == 17


def test_fewer_micro_batches_than_micro_steps_leave_the_last_one_busy():
    assert spread(["a", "b"], 5) == [[], [], ["a"], [], ["b"]]  # type: ignore[list-item]


def test_nominal_micro_batches_take_their_rows_from_every_rank():
    assert [part.tolist() for part in nominal_parts(8, 2, 2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize(
    ("rows", "longest", "largest", "device", "tokens"),
    [
        (8, 192, 1088, "cpu", 1088),  # a group of a 64-token prompt and 8 x 128 stays whole
        (8, 100, 300, "cpu", 800),  # never more than 8 padded rows
        (64, 100, 300, "cpu", 1024),  # enough for a CPU
        (64, 100, 300, "cuda", 6400),
        (2, 576, 1536, "cpu", 1152),  # a group is cut where the user's batch size is smaller
    ],
)
def test_the_derived_budget(rows, longest, largest, device, tokens):
    assert derived_budget(rows, longest, largest, device) == tokens


@pytest.mark.parametrize(
    ("room", "tokens"),
    [(0, 1536), (1000, 1536), (6000, 6000), (50_000, 16_384)],
    ids=["unknown", "little", "some", "much"],
)
def test_room_in_gpu_memory_enlarges_micro_batches(room, tokens):
    assert derived_budget(8, 192, 1088, "cuda", room) == tokens
    assert derived_budget(8, 192, 1088, "cpu", 0) == 1088
