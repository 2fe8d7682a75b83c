"""Chat templates in the style of the families, with tokenizers that have their control tokens.

Written for the tests. Each is as strict as its model's own: about roles, ids of calls, or the type of arguments.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if loop.index0 == 0 and tools %}Tools: {{ tools | tojson }}\n{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}<function>{{ t.function.name }}</function>\n"
    "{% endfor %}Call as <function=name><parameter=key>value</parameter></function>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>\n"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_ARGS = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
FUNCTION_GEMMA = (
    "{{ bos_token }}{% if tools %}<start_of_turn>developer\n{% for t in tools %}declaration:{{ t.function.name }}"
    "{% endfor %}<end_of_turn>\n{% endif %}"
    "{% for m in messages %}{% set after_result = not loop.first and messages[loop.index0 - 1].role == 'tool' %}"
    "{% if m.role == 'tool' %}<start_function_response>response:{{ m.name }}{value:<escape>{{ m.content }}<escape>}"
    "<end_function_response>"
    "{% else %}{% if m.role != 'assistant' or not after_result %}"
    "{% if after_result %}<end_of_turn>\n{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<start_function_call>call:{{ c.function.name ~ '{' }}"
    "{% for key, value in c.function.arguments | items %}{{ key }}:<escape>{{ value }}<escape>"
    "{% if not loop.last %},{% endif %}{% endfor %}}<end_function_call>{% endfor %}"
    "{% if not m.tool_calls %}<end_of_turn>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<start_of_turn>model\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}"
    "{% else %}<｜Assistant｜>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% if loop.first %}<｜tool▁calls▁begin｜>{% endif %}"
    "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}\n"
    "```json\n{{ c.function.arguments + '' }}\n```"
    "<｜tool▁call▁end｜>{% if loop.last %}<｜tool▁calls▁end｜>{% endif %}{% endfor %}<｜end▁of▁sentence｜>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for key, value in c.function.arguments | items %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GENERIC = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }}\n{% endfor %}"
    # A line break before the content: a generation prompt that ends in a space would merge with the first word.
    "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its control tokens, and how an assistant's turn is rendered by it.

    Attributes:
        template: the chat template.
        eos: the tokenizer's end of sequence.
        special: further control tokens.
        ends: tokens that end a turn, where they are not `eos`.
        arguments: what the template wants the arguments of a call to be.
        role: of results.
        shows_tools: whether the template tells of tools.
        calls: how many a turn may have in the template; 0: it renders none, and they are part of the content.
        written: how a policy writes its calls into the content.
        broken: something that is meant as a call and cannot be read; "" where the template could not say it.
        asks_with: the token that ends a turn with calls, where the template does not end it.
        ends_with: the same of a turn without calls.
    """

    template: str
    eos: str
    special: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    arguments: type = dict
    role: str = "tool"
    shows_tools: bool = True
    calls: int = 3
    written: Callable[[list[str]], str] = lambda queries: "\n".join(
        json.dumps({"name": "lookup", "arguments": {"q": word}}) for word in queries
    )
    broken: str = '{"name": "lookup", "arguments": {"q": '
    asks_with: str = ""
    ends_with: str = ""


FAMILIES = {
    "qwen": Family(QWEN, "<|im_end|>", ("<|im_start|>",), broken='<tool_call>\n{"name": "lookup"\n</tool_call>'),
    "qwen3_coder": Family(
        QWEN3_CODER,
        "<|im_end|>",
        ("<|im_start|>",),
        broken="<tool_call>\n<function=lookup>\nx\n</function>\n</tool_call>",
    ),
    "llama3": Family(
        LLAMA3,
        "<|eot_id|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        calls=1,
        written=lambda queries: "; ".join(
            json.dumps({"name": "lookup", "parameters": {"q": word}}) for word in queries
        ),
        broken='<|python_tag|>{"name": "lookup"',
    ),
    "mistral": Family(
        MISTRAL,
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        broken='[TOOL_CALLS] [{"name": "lookup"',
    ),
    "mistral_args": Family(
        MISTRAL_ARGS,
        "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        broken="[TOOL_CALLS]lookup[ARGS]{",
    ),
    "gemma": Family(
        GEMMA,
        "<eos>",
        ("<start_of_turn>", "<end_of_turn>"),
        ("<end_of_turn>",),
        role="user",
        shows_tools=False,
        calls=0,
        written=lambda queries: "```tool_code\n" + "\n".join(f'lookup(q="{word}")' for word in queries) + "\n```",
        broken="```tool_code\nlookup(1)\n```",
    ),
    "functiongemma": Family(
        FUNCTION_GEMMA,
        "<eos>",
        (
            *("<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>"),
            *("<start_function_response>", "<end_function_response>"),
        ),
        ("<end_of_turn>", "<start_function_response>"),
        broken="",  # a turn without calls is ended before what follows it
        asks_with="<start_function_response>",
    ),
    "deepseek": Family(
        DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
        arguments=str,
        broken="<｜tool▁call▁begin｜>lookup<｜tool▁call▁end｜>",
    ),
    "glm": Family(
        GLM,
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|user|>", "<|observation|>"),  # which begin the next turn, and which a policy writes to end its own
        broken="<tool_call>lookup\n<arg_key>q</arg_key>\n</tool_call>",
        asks_with="<|observation|>",
        ends_with="<|user|>",
    ),
    "chatml": Family(CHATML, "<|im_end|>", ("<|im_start|>",), shows_tools=False, calls=0),
    "generic": Family(GENERIC, "<|endoftext|>", calls=0),
}


def tokenizer_of(family, template=None):
    """Byte pairs learnt on a little text, so that tokens do merge over the boundaries of messages if they may."""
    control = ["<bos>", family.eos, *family.special]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=control, show_progress=False
    )
    made.train_from_iterator([family.template, "user\nthe answer is 4\n\nassistant\n ", GENERIC * 2], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token=family.eos)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in family.special])
    tokenizer.chat_template = template or family.template
    return tokenizer


TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}
