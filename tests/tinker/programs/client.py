"""Programs of the official client, each a function; the one that is named runs, and prints what it found as JSON."""

import json
import sys

import numpy as np

import tinker
from tinker import types

NAME = "tiny"


def done(future):
    """The result; older clients return some at once."""
    return future.result() if hasattr(future, "result") else future


def service():
    return tinker.ServiceClient()


def client(rank=4, **options):
    return done(service().create_lora_training_client(base_model=NAME, rank=rank, seed=1, **options))


def tensor(values):
    array = np.asarray(values)
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return types.TensorData(data=array.flatten().tolist(), dtype=str(array.dtype), shape=list(array.shape))


def datum(tokens, **inputs):
    given = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1), **inputs}
    given = {name: tensor(values) for name, values in given.items() if values is not None}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


DATA = [datum([5, 6, 7, 8, 9]), datum([10, 11, 12]), datum([20, 21, 22, 23]), datum([30, 31]), datum([40, 41, 42])]
PROMPT = types.ModelInput.from_ints([5, 6, 7])


def step(training, rate=0.01):
    return training.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8))


def scored(training, data=DATA):
    """Log-probs of the data under a client's weights."""
    outputs = done(training.forward(data, "cross_entropy")).loss_fn_outputs
    return [one["logprobs"].data for one in outputs]


def every_call():
    """A program's whole life."""
    training = client(rank=8)
    info = training.get_info()
    first = training.forward_backward(DATA, "cross_entropy")
    after = step(training)
    first, after = done(first), done(after)
    sampler = done(training.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=4, temperature=0.7, seed=3, stop=[])
    sampled = done(sampler.sample(PROMPT, 2, params))
    told = done(sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8, 9])))
    now = scored(training)
    step_two = [training.forward_backward(DATA, "cross_entropy"), step(training)]
    [done(one) for one in step_two]
    again = done(sampler.sample(PROMPT, 2, params))
    saved = done(training.save_state("state")).path
    named = done(training.save_weights_for_sampler("named")).path
    resumed = done(service().create_training_client_from_state_with_optimizer(saved))
    fresh = done(service().create_training_client_from_state(saved))
    from_path = done(service().create_sampling_client(model_path=named))
    base = done(service().create_sampling_client(base_model=NAME))
    return {
        "rank": info.lora_rank,
        "loss": first.metrics["loss:sum"],
        "first": [one["logprobs"].data for one in first.loss_fn_outputs],
        "grad_norm": after.metrics["grad_norm"],
        "lengths": [len(one.tokens) for one in sampled.sequences],
        "frozen": [list(one.tokens) for one in sampled.sequences] == [list(one.tokens) for one in again.sequences],
        "prompt": told,
        "now": now,
        "end": scored(training),
        "resumed": scored(resumed),
        "fresh": scored(fresh),
        "from_path": done(from_path.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8, 9]))),
        "base": done(base.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8, 9]))),
    }


def losses():
    """A step's log-probs and gradient norm for each loss, so that nothing is refused."""
    inputs = {"logprobs": [-1.0, -2.0, -1.5], "advantages": [0.0, 1.0, -1.0], "weights": None}
    found = {}
    for name, more, config in (
        ("importance_sampling", {}, None),
        ("ppo", {}, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
        ("cispo", {}, None),
        ("dro", {}, {"beta": 0.05}),
    ):
        training = client()
        data = [datum([5, 6, 7, 8], **inputs, **more)]
        result = training.forward_backward(data, name, loss_fn_config=config)
        found[name] = done(result).metrics["loss:sum"], done(step(training)).metrics["grad_norm"]
    return found


def custom():
    """A loss of one's own, here cross-entropy, and the built-in one."""
    own, built_in = client(), client()

    def loss(data, logprobs):
        return -sum(one.sum() for one in logprobs), {"mine": 1.0}

    metrics = done(own.forward_backward_custom(DATA, loss)).metrics
    done(built_in.forward_backward(DATA, "cross_entropy"))
    norms = [done(step(one)).metrics["grad_norm"] for one in (own, built_in)]
    return {"metrics": metrics, "norms": norms, "own": scored(own), "built_in": scored(built_in)}


def steps():
    """One step on the data, and the log-probs afterwards: what chunks and repeats must not change."""
    training = client()
    first = training.forward_backward(DATA, "cross_entropy")
    last = step(training)
    result = done(first)
    done(last)
    return {"loss": result.metrics["loss:sum"], "outputs": len(result.loss_fn_outputs), "end": scored(training)}


def many_targets():
    """Two targets of each position, sent dense and sparse, and one after the other."""
    tokens, targets = types.ModelInput.from_ints([5, 6, 7, 8]), np.array([[6, 9], [7, 10], [8, 11], [9, 12]])
    weights = np.array([[0.5, 0.0], [0.0, 1.0], [0.25, 0.75], [0.0, 0.0]], np.float32)
    rows = np.cumsum([0, *(weights != 0).sum(1)])
    columns = weights.nonzero()[1]
    dense = {"target_tokens": tensor(targets), "weights": tensor(weights)}
    sparse = {
        name: types.TensorData(
            data=values[weights != 0].tolist(),
            dtype=kind,
            shape=[4, 2],
            sparse_crow_indices=rows.tolist(),
            sparse_col_indices=columns.tolist(),
        )
        for name, values, kind in (("target_tokens", targets, "int64"), ("weights", weights, "float32"))
    }
    found, norms = [], []
    for inputs in (dense, sparse):
        training = client()
        data = [types.Datum(model_input=tokens, loss_fn_inputs=inputs)]
        found.append(done(training.forward_backward(data, "cross_entropy")))
        norms.append(done(step(training)).metrics["grad_norm"])
    alone = client()
    each = [
        types.Datum(
            model_input=tokens,
            loss_fn_inputs={"target_tokens": tensor(targets[:, k]), "weights": tensor(weights[:, k])},
        )
        for k in range(2)
    ]
    shown = [np.where(weights != 0, np.reshape(one.loss_fn_outputs[0]["logprobs"].data, (4, 2)), 0.0) for one in found]
    return {
        "shapes": [one.loss_fn_outputs[0]["logprobs"].shape for one in found],
        "dense": shown[0].tolist(),
        "sparse": shown[1].tolist(),
        "loss": found[0].metrics["loss:sum"],
        "loss_of_each": done(alone.forward_backward(each, "cross_entropy")).metrics["loss:sum"],
        "norms": [norms[0], done(step(alone)).metrics["grad_norm"]],
    }


def failures():
    """Errors as a program sees them."""
    training, found = client(), {}

    def told(name, work):
        try:
            done(work())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "no error"

    told("loss", lambda: training.forward_backward(DATA, "stable_reinforce"))
    told("step", lambda: step(training))
    told("datum", lambda: training.forward_backward([datum([5, 6, 500])], "cross_entropy"))
    told("again", lambda: step(training))
    told("empty", lambda: step(training))
    told("model", lambda: service().create_lora_training_client(base_model="other", rank=4))
    told("rank", lambda: service().create_lora_training_client(base_model=NAME, rank=1000))
    sampler = done(service().create_sampling_client(base_model=NAME))
    told("stop", lambda: sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2, stop=[""])))
    return found


def save(path):
    """Save a state, and say where."""
    training = client()
    for _ in range(2):
        work = [training.forward_backward(DATA, "cross_entropy"), step(training)]
        [done(one) for one in work]
    return {"path": done(training.save_state("two")).path, "end": scored(training)}


def resume(path):
    """Continue from a state."""
    return {"end": scored(done(service().create_training_client_from_state_with_optimizer(path)))}


def long():
    """Six steps, each of which samples from its own weights."""
    training, found = client(), []
    for number in range(6):
        sampler = done(training.save_weights_and_get_sampling_client())
        sampled = done(sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=6, seed=number)))
        found.append([[list(one.tokens), list(one.logprobs)] for one in sampled.sequences])
        work = [training.forward_backward(DATA, "cross_entropy"), step(training)]
        found += [done(one).metrics for one in work]
    return {"found": found, "end": scored(training), "path": done(training.save_state("end")).path}


print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
