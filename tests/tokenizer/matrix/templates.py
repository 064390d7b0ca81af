# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the shape of the published ones. << and >> enclose an answer: see `blocks` and `TEMPLATES`."""

_SYSTEM = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set rest = messages %}{% set system = false %}{% endif %}"""
_IN_TURN = """{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"""

_SOURCES = dict(
    llama2=_SYSTEM
    + """{% for message in rest %}"""
    + _IN_TURN
    + """{% if loop.index0 == 0 and system != false %}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}@<{{ ' ' + content.strip() + ' ' + eos_token }}@>{% endif %}{% endfor %}""",
    llama3="""{% for message in messages %}
{%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{%- if loop.index0 == 0 %}{{ bos_token }}{% endif %}{{ head }}
{%- if message['role'] == 'assistant' %}@<{{ message['content'] | trim + '<|eot_id|>' }}@>
{%- else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    qwen2="""{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are a model.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' }}@<{{- message.content + '<|im_end|>' }}@>{{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    qwen3="""{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n' }}@<
        {%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{{- content + '<|im_end|>' }}@>{{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    gemma="""{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set first = '' %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if role == 'model' %}@<{{- message['content'] | trim + '<end_of_turn>\\n' }}@>
    {%- else %}{{- message['content'] | trim + '<end_of_turn>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}""",
    mistral1="""{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}@<{{ message['content'] + eos_token }}@>
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    mistral3=_SYSTEM
    + """{{- bos_token }}{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' }}{%- if loop.last and system != false %}{{- system + '\\n\\n' }}{%- endif %}
        {{- message['content'] + '[/INST]' }}
    {%- else %}@<{{- ' ' + message['content'] + eos_token }}@>{%- endif %}
{%- endfor %}""",
    tekken=_SYSTEM
    + """{{- bos_token }}{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {{- '[INST]' + ((system + '\\n\\n') if loop.first and system != false else '') + message['content'] + '[/INST]' }}
    {%- else %}@<{{- message['content'] + eos_token }}@>{%- endif %}
{%- endfor %}""",
    phi3="""{% for message in messages %}
{%- if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}@<{{ message['content'] + '<|end|>\\n' }}@>
{%- else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""",
    phi4="""{% for message in messages %}{{ '<|im_start|>' + message['role'] + '<|im_sep|>' }}
{%- if message['role'] == 'assistant' %}@<{{ message['content'] + '<|im_end|>' }}@>
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    deepseek3="""{% set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}{{ '<|Assistant|>' }}@<{{ message['content'] + eos_token }}@>{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}""".replace("<|", "<\uff5c").replace("|>", "\uff5c>"),
    harmony="""{{- '<|start|>system<|message|>You are a model.\\n\\n# Valid channels: analysis, final.<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant' }}@<{{- '<|channel|>final<|message|>' + message.content }}
        {%- if loop.last and not add_generation_prompt %}{{- '<|return|>' }}{%- else %}{{- '<|end|>' }}{%- endif %}@>
    {%- elif message.role == 'system' %}
        {{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '\\n\\n<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
    olmo2="""{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}
{%- else %}{{ '<|assistant|>\\n' }}@<{{ message['content'] + eos_token }}@>
{%- if not loop.last %}{{ '\\n' }}{% endif %}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}""",
    chatml="""{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are a model<|im_end|>' }}
    {% endif %}
    {% if message['role'] == 'assistant' %}
{{ '<|im_start|>assistant\\n' }}@<{{- message['content'] + '<|im_end|>' }}@>{{ '\\n' }}
{%- else %}
{{ '<|im_start|>' + message['role'] }}
{{ message['content'] + '<|im_end|>' }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    falcon="""{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}
{%- if message['role'] == 'system' %}{{ message['content'] }}
{%- elif message['role'] == 'user' %}{{ 'User: ' + message['content'].replace('\\r\\n', '\\n') }}
{%- else %}{{ 'Falcon:' }}@<{{ ' ' + message['content'] + eos_token }}@>{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '\\n' + 'Falcon:' }}{% endif %}""",
)


def blocks(name: str) -> str:
    """The template with {% generation %} blocks around answers."""
    return _SOURCES[name].replace("@<", "{%- generation %}").replace("@>", "{%- endgeneration %}")


TEMPLATES = {name: source.replace("@<", "").replace("@>", "") for name, source in _SOURCES.items()}
