"""Tools: the model looks up a price and then answers; tool results are not trained on.

A tool is a function with type hints and a docstring. SmolLM2's chat template shows models no tools, so every prompt
begins with two examples of a call; most models of today need none.
"""

import json

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer

PRICES = {"tea": 3, "soap": 14, "rope": 29, "lamp": 47, "boots": 85, "chair": 62, "kettle": 38, "mirror": 91}
EXAMPLES = ("tea", "soap")


def price(item: str) -> int:
    """Look up what something costs.

    Args:
        item: What it is called.
    """
    return PRICES[item]  # an item that is not there is an error, which the model reads


def conversation(item):
    """Two examples and a question."""
    messages = []
    for known in EXAMPLES:
        call = json.dumps({"name": "price", "arguments": {"item": known}})
        turns = {"user": f"Price of {known}?", "assistant": call, "tool": str(PRICES[known])}
        messages += [{"role": role, "content": text} for role, text in turns.items()]
        messages.append({"role": "assistant", "content": str(PRICES[known])})
    return [*messages, {"role": "user", "content": f"Price of {item}?"}]


def looked_up(completions, item, **kwargs):
    """Half a point for calling the tool with the right item, and another half for the right answer after it."""
    scores = []
    for completion, wanted in zip(completions, item, strict=True):
        calls = [call["function"] for message in completion for call in message.get("tool_calls", [])]
        called = {"name": "price", "arguments": {"item": wanted}} in calls
        scores.append(0.5 * called + 0.5 * (called and completion[-1]["content"] == str(PRICES[wanted])))
    return scores


def main():
    options = parser(__doc__).parse_args()
    trainer = GRPOTrainer(
        model=options.model,
        tools=[price],
        reward_funcs=looked_up,
        args=GRPOConfig(
            **settings(options) | {"max_completion_length": 64},
            max_tool_calling_iterations=2,  # rounds of calls
            tool_timeout=5,  # seconds for each
            tool_parser="json",  # where the template does not say how calls are written
        ),
        train_dataset=[{"prompt": conversation(item), "item": item} for item in PRICES if item not in EXAMPLES],
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
