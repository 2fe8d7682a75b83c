"""Parts of a training step against their usual implementations: `python -m benchmarks.parts`.

Prompts are one-digit sums with completions of the model at temperature 1, so lengths are natural.
"""

import torch

from benchmarks.measure import compare
from covey.cli.demo import model_folder, sums
from covey.core.batch import collate
from covey.core.engine import SamplingParams
from covey.engines.native.engine import NativeEngine
from covey.policy.loading import end_token_ids
from covey.policy.scoring import TokenScorer
from covey.rollout.collector import Collector, PromptSample
from covey.rollout.prompts import PromptCodec

PROMPTS, GROUP, LIMIT = 8, 8, 64


def main() -> None:
    """Run every comparison."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rows = sums(seed=0)[0][:PROMPTS]
    engine = NativeEngine(
        lambda: model, eos_token_ids=end_token_ids(model, tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    codec = PromptCodec(tokenizer, None, None)
    collector = Collector(engine, codec, seed=0)
    draws = [PromptSample(row, i, g) for i, row in enumerate(rows) for g in range(GROUP)]
    params = SamplingParams(max_tokens=LIMIT)

    def native() -> object:
        return collector.collect(draws, params, ("bench", 0))

    def lock_step() -> object:
        prompts = [codec.read(draw.row["prompt"]).ids for draw in draws]
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        return model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=LIMIT)

    compare("sampling: native engine / model.generate", native, lock_step)

    rollouts = collector.collect(draws, params, ("bench", 0))
    batch = collate(rollouts)
    lengths = batch.lengths.float()
    print(f"completions: {len(batch)}, mean length {lengths.mean():.1f}, longest {lengths.max():.0f}")
    model.train()

    def backward(layout: str) -> object:
        scorer = TokenScorer(lambda m: m, temperature=1.0, layout=layout, pad_token_id=tokenizer.pad_token_id)
        for part in batch.split(32):
            scorer(model, part, entropy=True).logprobs.sum().backward()
        model.zero_grad()
        return None

    compare(
        "forward and backward: shared prompts / packed", lambda: backward("shared_prefix"), lambda: backward("packed")
    )
    compare("forward and backward: packed / padded rows", lambda: backward("packed"), lambda: backward("padded"))

    def whole_logits() -> object:
        for part in batch.split(32):
            rows = [torch.cat([part.prompts()[g], c]) for g, c in zip(part.groups, part.completions(), strict=True)]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
            logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
            logprobs.gather(-1, ids[:, 1:, None]).sum().backward()
        model.zero_grad()
        return None

    compare(
        "forward and backward: shared prompts, chosen positions / padded, all logits",
        lambda: backward("shared_prefix"),
        whole_logits,
    )


if __name__ == "__main__":
    main()
