"""Ways to make a NaN or an infinity: each is stopped within its step, and the checkpoint before it stays whole."""

import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

from covey import GRPOTrainer
from covey.algorithms import ADVANTAGES, LOSS_TYPES, register_advantages, register_loss
from covey.core.engine import EngineTraits
from covey.trainer.checks import NotFiniteError
from tests.support import runs, tiny
from tests.support.foreign import sample_from

SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


class From(TrainerCallback):
    """Calls a function before each micro-step from the second optimizer step on."""

    def __init__(self, function):
        self.function = function

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= 1:
            self.function()


def trainer(folder, spoil=None, steps=3, parts=None, **settings):
    made = runs.trainer(folder, max_steps=steps, parts=parts, **{**SAVES, **settings})
    if spoil is not None:
        made.add_callback(From(lambda: spoil(made)))
    return made


def gradient(value):
    def way(folder):
        made = trainer(folder)

        def spoil(parameter):
            if made.state.global_step == 1:
                parameter.grad.mul_(0).add_(value)

        made.model.lm_head.weight.register_post_accumulate_grad_hook(spoil)
        return made

    return way


def loss(spoilt):
    """A registered loss that is spoilt in the second optimizer step."""

    def way(folder):
        LOSS_TYPES.pop("spoilt", None)
        register_loss("spoilt", lambda x: spoilt(x) if made.state.global_step == 1 else -x.ratio * x.advantages)
        made = trainer(folder, loss_type="spoilt")
        return made

    return way


def one_token(x):
    return -x.ratio * x.advantages + torch.zeros_like(x.advantages).index_fill(0, torch.tensor([0]), math.nan)


def logits(value, training):
    """The head's logits, while training or while sampling."""

    def way(folder):
        made = trainer(folder, gradient_checkpointing=False, attn_layout="padded")
        inner = made.model.model.norm

        def spoil(module, args, output):
            if made.state.global_step == 1 and torch.is_grad_enabled() == training:
                return output + value
            return output

        inner.register_forward_hook(spoil)
        return made

    return way


def model(value):
    def way(folder):
        spoilt = tiny.model()
        spoilt.lm_head.weight.data[3, 2] = value
        return trainer(folder, parts={"model": spoilt})

    return way


def weights(value):
    def spoil(made):
        made.model.lm_head.weight.data[3, 2] = value

    return lambda folder: trainer(folder, spoil)


def optimizer(folder):
    def spoil(made):
        def enlarge(weight):
            weight.grad.mul_(1e4)

        made.optimizer.param_groups[0]["lr"] = 3e38
        made.model.lm_head.weight.register_post_accumulate_grad_hook(enlarge)

    return trainer(folder, spoil, optim="sgd", max_grad_norm=1e30)


def moments(folder):
    """As after loading a damaged optimizer.pt."""

    def spoil(made):
        next(iter(made.optimizer.state.values()))["exp_avg"].fill_(math.nan)

    return trainer(folder, spoil)


def setting(**settings):
    return lambda folder: trainer(folder, **settings)


def reward(value):
    def way(folder):
        def returns(completion_ids, **kwargs):
            return [
                value if made.state.global_step == 1 and not n else float(len(c)) for n, c in enumerate(completion_ids)
            ]

        made = trainer(folder, parts={"reward_funcs": returns})
        return made

    return way


def engine(value, **settings):
    """A user's engine whose log-probs are spoilt from the fourth rollout batch on, after the first checks."""

    def way(folder):
        made = trainer(folder, steps=5, **settings)

        def report(logprobs):
            return [value] * len(logprobs) if made.state.global_step >= 3 else logprobs

        return sample_from(made, report=report, traits=EngineTraits())

    return way


def buffer(folder):
    return trainer(folder, lambda made: made.model.model.rotary_emb.inv_freq.fill_(math.nan))


def last_pass(folder):
    """The gradient of the last micro-batch of the second step alone."""
    made, passes = trainer(folder), []

    def spoil(parameter):
        passes.append(made.state.global_step)
        if passes == [0, 0, 1, 1]:
            parameter.grad.view(-1)[5] = math.nan

    made.model.model.norm.weight.register_post_accumulate_grad_hook(spoil)
    return made


def infinite_moments(folder):
    """Second moments so large that no weight changes again, and all weights stay finite."""

    def spoil(made):
        for state in made.optimizer.state.values():
            state["exp_avg_sq"].fill_(math.inf)

    return trainer(folder, spoil)


def schedule(folder):
    """A schedule of one's own that ends in NaN."""

    def spoil(made):
        made.lr_scheduler.lr_lambdas = [lambda step: math.nan] * len(made.lr_scheduler.lr_lambdas)

    return trainer(folder, spoil, steps=4)


def overridden_loss(folder):
    class Spoilt(GRPOTrainer):
        def compute_loss(self, *given, **named):
            return super().compute_loss(*given, **named) * (math.inf if self.state.global_step == 1 else 1)

    return runs.trainer(folder, max_steps=3, kind=Spoilt, **SAVES)


def adapter(folder):
    made = trainer(folder, parts={"peft_config": LoraConfig(r=2, target_modules="all-linear")})
    made.add_callback(
        From(lambda: next(p for n, p in made.model.named_parameters() if "lora_B" in n).data.fill_(math.nan))
    )
    return made


def large_advantages(folder):
    ADVANTAGES.pop("large", None)
    register_advantages("large", lambda x: (x.totals - x.totals.mean(1, keepdim=True)) * 1e300)
    return trainer(folder, advantages="large")


def second_moments(folder):
    """Finite and below 0, so that their root is not."""
    return trainer(folder, lambda made: next(iter(made.optimizer.state.values()))["exp_avg_sq"].fill_(-1.0))


def advantages(folder):
    def spoilt(x):
        found = x.totals - x.totals.mean(1, keepdim=True)
        return found / (made.state.global_step != 1)

    ADVANTAGES.pop("spoilt", None)
    register_advantages("spoilt", spoilt)
    made = trainer(folder, advantages="spoilt")
    return made


def penalty(folder):
    """The KL divergence that RLOO takes from the reward."""
    made = runs.trainer(folder, method="rloo", max_steps=3, beta=0.1, **SAVES)
    made.add_callback(From(lambda: made.reference.copy.lm_head.weight.data.fill_(math.nan)))
    return made


def reference(folder):
    def spoil(made):
        made.reference.copy.lm_head.weight.data[3, 2] = math.nan

    return trainer(folder, spoil, beta=0.1)


def bf16_overflow(folder):
    """Finite weights whose products are beyond bfloat16."""

    def spoil(made):
        made.model.model.layers[0].mlp.up_proj.weight.data.fill_(3e38)

    return trainer(folder, spoil, bf16=True)


@dataclass(frozen=True)
class Way:
    make: Any
    outcome: str  # "skipped", "ended", "refused", "left out" or "harmless"
    says: str = ""


WAYS = {
    "gradient nan": Way(gradient(math.nan), "skipped", "gradient is nan"),
    "gradient inf": Way(gradient(math.inf), "skipped", "gradient is (inf|nan)"),
    "gradient whose norm overflows": Way(gradient(1e30), "skipped", "gradient is inf"),
    "loss nan": Way(loss(lambda x: x.ratio * math.nan), "skipped", r"micro-batches whose loss is not: 1 \(loss nan\)"),
    "loss inf": Way(loss(lambda x: x.ratio * math.inf), "skipped", "loss inf|loss nan"),
    "loss nan by a constant": Way(loss(lambda x: -x.ratio * x.advantages + math.nan), "skipped", "loss nan"),
    "loss nan at one token": Way(loss(one_token), "skipped", "loss nan"),
    "loss log of 0": Way(loss(lambda x: (x.ratio - 1.0).log()), "skipped", "loss -?inf|loss nan"),
    "logits nan in training": Way(logits(math.nan, True), "skipped", "loss nan"),
    "logits nan in sampling": Way(logits(math.nan, False), "ended", "logits are NaN or infinite"),
    "logits inf in sampling": Way(logits(math.inf, False), "ended", "logits are NaN or infinite"),
    "model with nan": Way(model(math.nan), "refused", "the model holds weights"),
    "model with inf": Way(model(math.inf), "refused", "the model holds weights"),
    "weights nan": Way(weights(math.nan), "ended", "logits are NaN or infinite"),
    "weights inf": Way(weights(math.inf), "ended", "logits are NaN or infinite"),
    "optimizer": Way(optimizer, "ended", "weights are NaN or infinite, so they are not saved"),
    "optimizer's moments": Way(moments, "ended", "weights are NaN or infinite, so they are not saved"),
    "weight_decay": Way(setting(weight_decay=math.nan), "refused", "weight_decay=nan is not a number"),
    "learning_rate": Way(setting(learning_rate=math.inf), "refused", "learning_rate=inf"),
    "entropy_coef": Way(setting(entropy_coef=math.nan), "refused", "entropy_coef=nan is not a number"),
    "max_grad_norm": Way(setting(max_grad_norm=math.nan), "refused", "max_grad_norm=nan"),
    "beta": Way(setting(beta=math.inf), "refused", "beta=inf"),
    "temperature": Way(setting(temperature=math.nan), "refused", "temperature=nan"),
    "epsilon": Way(setting(epsilon=math.inf), "refused", "epsilon=inf"),
    "adam_beta1": Way(setting(adam_beta1=math.nan), "refused", "adam_beta1=nan"),
    "reward weights": Way(setting(reward_weights=[math.nan]), "refused", "finite number"),
    "reward nan": Way(reward(math.nan), "left out", "returned NaN"),
    "reward inf": Way(reward(math.inf), "left out", "returned inf"),
    "reward beyond float32": Way(reward(1e39), "left out", "ordinary size"),
    "engine nan": Way(engine(math.nan), "harmless", "reported no log-probs"),
    "engine -inf": Way(engine(-math.inf), "ended", "log-probs are not usable|reported no log-probs"),
    "engine inf": Way(engine(math.inf), "ended", "log-probs are not usable|reported no log-probs"),
    "engine above 0": Way(engine(80.0), "ended", "infinite or above 0"),
    "rope": Way(buffer, "ended", "logits are NaN or infinite"),
    "gradient nan in the last pass": Way(last_pass, "skipped", "gradient is nan"),
    "second moments": Way(second_moments, "ended", "weights are NaN or infinite, so they are not saved"),
    "infinite second moments": Way(infinite_moments, "ended", "moments of the optimizer are NaN or infinite"),
    "a schedule of one's own": Way(schedule, "ended", "weights are NaN or infinite, so they are not saved"),
    "an overridden compute_loss": Way(overridden_loss, "skipped", "gradient is nan"),
    "an adapter's weights": Way(adapter, "ended", "logits are NaN or infinite"),
    "advantages beyond float32": Way(large_advantages, "refused", "infinite advantage"),
    "advantages": Way(advantages, "ended", "advantages='spoilt' returned an infinite advantage"),
    "penalty": Way(penalty, "ended", "the KL divergence from the reference model is NaN"),
    "scheduler": Way(setting(lr_scheduler_kwargs={"power": math.nan}), "refused", "lr_scheduler_kwargs="),
    "optim_args": Way(setting(optim="sgd", optim_args="momentum=nan"), "refused", "optim_args='momentum=nan'"),
    "adam_epsilon": Way(setting(adam_epsilon=math.inf), "refused", "adam_epsilon=inf"),
    "weight beyond float32": Way(setting(reward_weights=[1e39]), "refused", "finite number"),
    "reference": Way(reference, "skipped", "loss nan"),
    "bf16 overflow": Way(bf16_overflow, "ended", "logits are NaN or infinite"),
}


def whole(folder):
    """The checkpoint's files hold finite numbers alone."""
    values = load_file(next(folder.glob("*model.safetensors"))).values()
    moments = torch.load(folder / "optimizer.pt", weights_only=True)["state"].values()
    tensors = [*values, *(value for state in moments for value in state.values() if isinstance(value, torch.Tensor))]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_no_way_to_make_a_nan_reaches_weights_or_checkpoints(tmp_path, name):
    way, raised = WAYS[name], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = way.make(tmp_path)
            made.train()
        except (NotFiniteError, FloatingPointError, ValueError, RuntimeError) as error:
            raised = error
    heard = " | ".join([str(raised), *(str(one.message) for one in caught)])
    assert (raised is not None) == (way.outcome in ("ended", "refused")), heard
    assert re.search(way.says, heard), heard
    folders = sorted(tmp_path.glob("checkpoint-*"))
    assert len(folders) == (way.outcome != "refused"), folders
    assert all(whole(folder) for folder in folders)
    if way.outcome == "skipped":
        assert runs.history(made, "updates/skipped_nonfinite") == [1.0] or name == "reference"
