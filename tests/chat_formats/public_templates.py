"""Chat templates as models are published with them, shortened, and answers of these models.

What surrounds messages, calls, results and reasoning is the family's; instructions are cut down to
what shows the form of a call. `families` has templates of the other formats.
"""

from __future__ import annotations

from dataclasses import dataclass

BAR = "\uff5c"  # in DeepSeek's markers


@dataclass(frozen=True)
class Published:
    """A family. calls: both of families.CALLS as the model writes them. before, after: what it
    writes around reasoning, of which a prompt that ends inside has the first. said: around text.
    in_words: the template writes no calls, so messages say them in words.
    """

    source: str
    calls: str
    before: str = "<think>\n"
    after: str = "\n</think>\n\n"
    opened: bool = False
    said: tuple[str, str] = ("", "\n\n")
    in_words: bool = False


SEED = r"""
{%- set bos, eos = '<seed:bos>', '<seed:eos>' -%}
{%- if messages[0].role == 'system' -%}
{{ bos + 'system\n' + messages[0].content }}{%- set messages = messages[1:] -%}
{%- elif tools -%}
{{ bos + 'system\nYou are Doubao, a helpful AI assistant.' }}
{%- endif -%}
{%- for t in tools or [] %}

Function:
def {{ t.function.name }}():
    {{ t.function.description }}
{%- endfor -%}
{%- if tools -%}
{{ '\n<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>value_1' }}
{{- '</parameter>\n</function>\n</seed:tool_call>\n' + eos }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ bos + m.role }}
{%- if m.reasoning_content is string and m.reasoning_content | trim -%}
{{ '\n<seed:think>' + m.reasoning_content | trim + '</seed:think>' }}
{%- endif -%}
{%- if m.content is string and m.content | trim -%}
{{ '\n' + m.content | trim }}{{ '\n' if m.tool_calls else eos }}
{%- endif -%}
{%- for c in m.tool_calls or [] -%}
{{ '\n<seed:tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for k, v in c.function.arguments | items -%}
{{ '<parameter=' + k + '>' + (v if v is string else v | string) + '</parameter>\n' }}
{%- endfor -%}
{{ '</function>\n</seed:tool_call>' }}
{%- endfor -%}
{{ eos if m.tool_calls }}
{%- else -%}
{{ bos + m.role + '\n' + m.content + eos }}
{%- endif -%}
{%- endfor -%}
{{ bos + 'assistant\n' if add_generation_prompt }}
"""
SEED_CALLS = """<seed:tool_call>
<function=get_weather>
<parameter=city>S\u00e3o "Paulo"</parameter>
<parameter=days>3</parameter>
<parameter=exact>True</parameter>
<parameter=tags>['a, b', ']']</parameter>
</function>
</seed:tool_call>
<seed:tool_call>
<function=add_note>
<parameter=text>12</parameter>
</function>
</seed:tool_call>"""

GEMMA3 = r"""
{%- if messages[0].role == 'system' -%}
{%- set system, messages = messages[0].content + '\n\n', messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- endif -%}
{%- if tools -%}
{%- set system = system + 'Wrap calls in ```tool_code```:\n' + tools|tojson + '\n\n' -%}
{%- endif -%}
{{ bos_token }}
{%- for m in messages -%}
{%- set role = 'model' if m.role == 'assistant' else 'user' -%}
{{ '<start_of_turn>' + role + '\n' + (system if loop.first else '') }}
{%- if m.role == 'tool' -%}
{{ '```tool_output\n' + m.content + '\n```' }}
{%- else -%}
{{ (m.content or '') | trim }}
{%- endif -%}
{%- if m.tool_calls -%}
{{ '\n\n' if m.content }}{{ '```tool_code\n' }}
{%- for c in m.tool_calls -%}
{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() -%}
{{ k }}={{ v|tojson if v is string else v }}{{ ', ' if not loop.last }}
{%- endfor -%}
){{ '\n' }}
{%- endfor -%}
{{ '```' }}
{%- endif -%}
{{ '<end_of_turn>\n' }}
{%- endfor -%}
{{ '<start_of_turn>model\n' if add_generation_prompt }}
"""
GEMMA3_CALLS = """```tool_code
get_weather(city="S\u00e3o \\"Paulo\\"", days=3, exact=True, tags=['a, b', ']'])
add_note(text="12")
```"""

DSML = r"""
{%- set thinks = enable_thinking | default(true) -%}
<!begin_of_sentence!>
{%- if messages[0].role == 'system' -%}
{{ messages[0].content }}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
{{ '\n\n## Tools\n<!DSML!SECTION>\n<!DSML!invoke name="$NAME">\n...\n</!DSML!invoke>\n' }}
{{- '</!DSML!SECTION>\n<functions>\n' }}{{ tools | tojson }}{{ '\n</functions>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
<!User!>{{ m.content }}<!Assistant!>{{ '<think>' if loop.last and thinks else '</think>' }}
{%- elif m.role == 'tool' -%}
{{ '\n\n<function_results>\n<result>' + m.content + '</result>\n</function_results>\n\n' }}
{{- '<think>' if loop.last and thinks else '</think>' }}
{%- else -%}
{{ m.reasoning_content + '</think>' if m.reasoning_content }}{{ m.content or '' }}
{%- if m.tool_calls -%}
{{ '\n\n<!DSML!SECTION>\n' }}
{%- for c in m.tool_calls -%}
{{ '<!DSML!invoke name="' + c.function.name + '">\n' }}
{%- for k, v in c.function.arguments.items() -%}
{{ '<!DSML!parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}
{{- v if v is string else v | tojson }}{{ '</!DSML!parameter>\n' }}
{%- endfor -%}
{{ '</!DSML!invoke>\n' }}
{%- endfor -%}
{{ '</!DSML!SECTION>' }}
{%- endif -%}
<!end_of_sentence!>
{%- endif -%}
{%- endfor -%}
""".replace("!", BAR)
DSML_CALLS = """<|DSML|SECTION>
<|DSML|invoke name="get_weather">
<|DSML|parameter name="city" string="true">S\u00e3o "Paulo"</|DSML|parameter>
<|DSML|parameter name="days" string="false">3</|DSML|parameter>
<|DSML|parameter name="exact" string="false">true</|DSML|parameter>
<|DSML|parameter name="tags" string="false">["a, b", "]"]</|DSML|parameter>
</|DSML|invoke>
<|DSML|invoke name="add_note">
<|DSML|parameter name="text" string="true">12</|DSML|parameter>
</|DSML|invoke>
</|DSML|SECTION>""".replace("|", BAR)

MINICPM5 = r"""
{%- if tools -%}
{{ '<|im_start|>system\n' + tools | tojson + '\n<function name="NAME"><param name="KEY">VALUE' }}
{{- '</param></function>, and put special characters in <![CDATA[ ]]>.<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + m.role + '\n' }}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content }}
{{- m.content or '' }}{{ '\n' if m.tool_calls and m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '<function name="' + c.function.name + '">' }}
{%- for k, v in c.function.arguments.items() -%}
{%- set text = v if v is string else v | tojson -%}
{%- set odd = '<' in text or '&' in text or '\n' in text -%}
{{ '<param name="' + k + '">' + ('<![CDATA[' + text + ']]>' if odd else text) + '</param>' }}
{%- endfor -%}
{{ '</function>' }}{{ '\n' if not loop.last }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}{{ '<think>\n\n</think>\n\n' if enable_thinking is false }}
{%- endif -%}
"""
MINICPM5_CALLS = (
    '<function name="get_weather"><param name="city">S\u00e3o "Paulo"</param>'
    '<param name="days">3</param><param name="exact">true</param>'
    '<param name="tags">["a, b", "]"]</param></function>\n'
    '<function name="add_note"><param name="text">12</param></function>'
)

GRANITE = r"""
{%- if messages[0].role == 'system' -%}
{%- set system, messages = messages[0].content, messages[1:] -%}
{%- else -%}
{%- set system = 'You are Granite, developed by IBM.' -%}
{%- if tools -%}
{%- set system = system + ' When a tool is required to answer, respond with <|tool_call|>' -%}
{%- set system = system + ' followed by a JSON list of tools used.' -%}
{%- elif thinking -%}
{%- set system = system + ' Write your thoughts between <think></think> and write your response' -%}
{%- set system = system + ' between <response></response> for each user query.' -%}
{%- endif -%}
{%- endif -%}
{{ '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools -%}
{{ '<|start_of_role|>available_tools<|end_of_role|>' + tools|tojson + '<|end_of_text|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}
{%- endfor -%}
{{ '<|start_of_role|>assistant<|end_of_role|>' if add_generation_prompt }}
"""
LISTED = (
    '[{"name": "get_weather", "arguments": {"city": "S\u00e3o \\"Paulo\\"", "days": 3, '
    '"exact": true, "tags": ["a, b", "]"]}}, {"name": "add_note", "arguments": {"text": "12"}}]'
)

NEMOTRON = r"""
{%- set ns = namespace(thinks=true, last=none) -%}
{%- for m in messages if '/no_think' in (m.content or '') -%}
{%- set ns.thinks = false -%}
{%- endfor -%}
{{ '<SPECIAL_10>System\n' }}
{%- if messages[0].role == 'system' -%}
{{ messages[0].content }}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
{{ '\n<AVAILABLE_TOOLS>' + tools | tojson + '</AVAILABLE_TOOLS>\n\n' }}
{{- '<TOOLCALL>[{"name": "tool_name1", "arguments": "tool_args1"}]</TOOLCALL>\n\n' }}
{%- endif -%}
{{ '\n\n' }}
{%- if messages[-1].role == 'assistant' -%}
{%- set ns.last, messages = messages[-1], messages[:-1] -%}
{%- endif -%}
{%- macro calls(m) -%}
{{ '<TOOLCALL>[' }}
{%- for c in m.tool_calls -%}
{{ '{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{{- '}' }}{{ ', ' if not loop.last }}
{%- endfor -%}
{{ ']</TOOLCALL>' }}
{%- endmacro -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{ '<SPECIAL_11>User\n' + m.content + '\n' }}
{%- elif m.role == 'tool' -%}
{{ '<SPECIAL_11>User\n<TOOL_RESPONSE>[' + m.content + ']</TOOL_RESPONSE>\n\n' }}
{%- else -%}
{{ '<SPECIAL_11>Assistant\n' + (m.content or '').split('</think>')[-1].strip() }}
{%- if m.tool_calls -%}{{ '\n\n' if m.content }}{{ calls(m) }}{%- endif -%}
{{ '\n<SPECIAL_12>\n\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt or ns.last -%}
{{ '<SPECIAL_11>Assistant\n' + ('<think>\n\n' if ns.thinks else '<think></think>') }}
{{- (ns.last.content or '').strip() if ns.last }}
{%- if ns.last and ns.last.tool_calls and not add_generation_prompt -%}
{{ calls(ns.last) + '\n<SPECIAL_12>\n\n' }}
{%- endif -%}
{%- endif -%}
"""

SOLAR = r"""
{%- if messages[0].role == 'system' or tools -%}
{{ '<|begin|>system<|content|>' }}
{%- if messages[0].role == 'system' -%}
{{ messages[0].content }}{%- set messages = messages[1:] -%}
{%- endif -%}
{{ '\n<|tools:begin|>' + tools | tojson + '<|tools:end|>' if tools }}{{ '<|end|>' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ '<|begin|>assistant<|think|>' + m.reasoning + '<|end|>' if m.reasoning }}
{%- if m.content or not m.tool_calls -%}
{{ '<|begin|>assistant<|content|>' + m.content + '<|end|>' }}
{%- endif -%}
{%- if m.tool_calls -%}
{{ '<|begin|>assistant<|tool_calls|>' }}
{%- for c in m.tool_calls -%}
{{ '<|tool_call:begin|>' + c.id + '<|tool_call:name|>' + c.function.name + '<|tool_call:args|>' }}
{{- c.function.arguments | tojson }}{{ '<|tool_call:end|>' }}
{%- endfor -%}
{{ '<|calls|>' }}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{{ '<|begin|>tool<|tool_response|><|tool_response:begin|>' + m.tool_call_id }}
{{- '<|tool_response:result|>' + m.content + '<|tool_response:end|><|end|>' }}
{%- else -%}
{{ '<|begin|>' + m.role + '<|content|>' + m.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|begin|>assistant<|think|><|end|>' if reasoning_effort in ['low', 'minimal'] }}
{{- '<|begin|>assistant' }}
{%- endif -%}
"""
SOLAR_CALLS = (
    "<|tool_calls|><|tool_call:begin|>call00000<|tool_call:name|>get_weather<|tool_call:args|>"
    '{"city": "S\u00e3o \\"Paulo\\"", "days": 3, "exact": true, "tags": ["a, b", "]"]}'
    "<|tool_call:end|><|tool_call:begin|>call00001<|tool_call:name|>add_note<|tool_call:args|>"
    '{"text": "12"}<|tool_call:end|>'
)

KIMI = r"""
{%- set q = namespace(ids=[], n=0) -%}
{{ '<|im_system|>tool_declare<|im_middle|>' + tools|tojson + '<|im_end|>' if tools }}
{%- for m in messages -%}
{%- set name = m.name or m.role -%}
{{ '<|im_' + (m.role if m.role in ['user', 'assistant'] else 'system') + '|>' + name }}
{{- '<|im_middle|>' }}
{%- if m.role == 'assistant' -%}
{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{{ m.content or '' }}
{%- if m.tool_calls -%}
{{ '<|tool_calls_section_begin|>' }}
{%- for c in m.tool_calls -%}
{%- set id = 'functions.' + c.function.name + ':' + q.n|string -%}
{%- set q.n = q.n + 1 -%}{%- set _ = q.ids.append(id) -%}
{{ '<|tool_call_begin|>' + id + '<|tool_call_argument_begin|>' + c.function.arguments|tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor -%}
{{ '<|tool_calls_section_end|>' }}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{{ '## Return of ' + q.ids.pop(0) + '\n' + m.content }}
{%- else -%}
{{ m.content }}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{{ '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt }}
"""
KIMI_CALLS = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "S\u00e3o \\"Paulo\\"", "days": 3, "exact": true, '
    '"tags": ["a, b", "]"]}<|tool_call_end|><|tool_call_begin|>functions.add_note:1'
    '<|tool_call_argument_begin|>{"text": "12"}<|tool_call_end|><|tool_calls_section_end|>'
)

KIMI_K3 = r"""
{%- macro opened(tag) -%}{{ '<|open|>' + tag + '<|sep|>' }}{%- endmacro -%}
{%- macro closed(tag) -%}{{ '<|close|>' + tag + '<|sep|>' }}{%- endmacro -%}
{%- set thinks = thinking is undefined or thinking -%}
{%- if tools -%}
{{ opened('message role="system" type="tool-declare"') + tools | tojson + closed('message') }}
{{- '<|end_of_msg|>' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ opened('message role="assistant"') }}
{{- opened('think') + (m.reasoning_content or '') + closed('think') if thinks }}
{{- opened('response') + (m.content or '') + closed('response') }}
{%- if m.tool_calls -%}
{{ opened('tools') }}
{%- for c in m.tool_calls -%}
{{ opened('call tool="' ~ c.function.name ~ '" index="' ~ loop.index ~ '"') }}
{%- for k, v in c.function.arguments.items() -%}
{%- set t = 'boolean' if v is boolean else 'string' if v is string else
    'number' if v is number else 'array' -%}
{{ opened('argument key="' ~ k ~ '" type="' ~ t ~ '"') }}
{{- (v if v is string else v | tojson) + closed('argument') }}
{%- endfor -%}
{{ closed('call') }}
{%- endfor -%}
{{ closed('tools') }}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{{ opened('message role="tool" tool="' ~ m.name ~ '"') + m.content }}
{%- else -%}
{{ opened('message role="' ~ m.role ~ '"') + m.content }}
{%- endif -%}
{{ closed('message') + '<|end_of_msg|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ opened('message role="assistant"') + opened('think' if thinks else 'response') }}
{%- endif -%}
"""
KIMI_K3_CALLS = (
    '!tools<|sep|>!call tool="get_weather" index="1"<|sep|>'
    '!argument key="city" type="string"<|sep|>S\u00e3o "Paulo"<|close|>argument<|sep|>'
    '!argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
    '!argument key="exact" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    '!argument key="tags" type="array"<|sep|>["a, b", "]"]<|close|>argument<|sep|>'
    '<|close|>call<|sep|>!call tool="add_note" index="2"<|sep|>'
    '!argument key="text" type="string"<|sep|>12<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
).replace("!", "<|open|>")

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)
IN_WORDS = (
    '{"tool_call": {"name": "get_weather", "arguments": {"city": "S\u00e3o \\"Paulo\\"", "days": 3,'
    ' "exact": true, "tags": ["a, b", "]"]}}}\n'
    '{"tool_call": {"name": "add_note", "arguments": {"text": "12"}}}'
)

MARK = "]<]minimax[>["
MINIMAX_M3 = r"""
{%- set mark = ']<]minimax[>[' -%}
{%- macro inner(v) -%}
{%- if v is mapping -%}
{%- for k, x in v.items() if x is not none %}{{ element(k, x) }}{% endfor -%}
{%- elif v is iterable and v is not string -%}
{%- for x in v %}{{ element('item', x) }}{% endfor -%}
{%- else -%}{{ v | tojson if v is boolean else v }}{%- endif -%}
{%- endmacro -%}
{%- macro element(k, v) -%}
{{ mark + '<' + k + '>' }}{{ inner(v) }}{{ mark + '</' + k + '>' }}
{%- endmacro -%}
{{- ']~!b[]~b]system\nYou are MiniMax-M3.[e~[\n' -}}
{%- if tools -%}
{{ ']~b]developer\n<tools>\n' }}
{%- for t in tools -%}<tool>{{ t.function | tojson }}</tool>{%- endfor -%}
{{ '</tools>\n\n' + mark + '<tool_call>\n' + mark + '<invoke name="tool-name-1">' }}
{{- element('param-1', ['value-1']) + mark + '</invoke>\n' + mark + '</tool_call>[e~[\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ ']~b]ai\n' }}
{%- if m.reasoning_content -%}<mm:think>{{ m.reasoning_content }}{%- endif -%}
</mm:think>{{ m.content or '' }}
{%- if m.tool_calls -%}
{{ mark + '<tool_call>\n' }}
{%- for c in m.tool_calls -%}
{{ mark + '<invoke name="' + c.function.name + '">' }}{{ inner(c.function.arguments) }}
{{- mark + '</invoke>\n' }}
{%- endfor -%}
{{ mark + '</tool_call>' }}
{%- endif -%}
{{ '[e~[\n' }}
{%- elif m.role == 'tool' -%}
{{ (']~b]tool\n' if loop.first or loop.previtem.role != 'tool') ~ '<response>' }}
{{- m.content + '</response>' + ('[e~[\n' if loop.last or loop.nextitem.role != 'tool' else '\n') }}
{%- else -%}
{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ ']~b]ai\n' }}
{%- if thinking_mode == 'enabled' %}<mm:think>{% endif -%}
{%- if thinking_mode == 'disabled' %}</mm:think>{% endif -%}
{%- endif -%}
"""
MINIMAX_M3_CALLS = """@<tool_call>
@<invoke name="get_weather">@<city>S\u00e3o "Paulo"@</city>@<days>3@</days>@<exact>true@</exact>\
@<tags>@<item>a, b@</item>@<item>]@</item>@</tags>@</invoke>
@<invoke name="add_note">@<text>12@</text>@</invoke>
@</tool_call>""".replace("@", MARK)
PUBLISHED = {  # name of the format -> family
    "seed-oss": Published(SEED, SEED_CALLS, "<seed:think>", "</seed:think>\n"),
    "gemma3": Published(GEMMA3, GEMMA3_CALLS),
    "deepseek-v3.2": Published(
        DSML.replace("SECTION", "function_calls"),
        DSML_CALLS.replace("SECTION", "function_calls"),
        "<think>",
        "</think>",
        opened=True,
    ),
    "deepseek-v4": Published(
        DSML.replace("SECTION", "tool_calls"),
        DSML_CALLS.replace("SECTION", "tool_calls"),
        "<think>",
        "</think>",
        opened=True,
    ),
    "minicpm5": Published(MINICPM5, MINICPM5_CALLS),
    "granite": Published(GRANITE, f"<|tool_call|>{LISTED}", in_words=True),
    "nemotron": Published(NEMOTRON, f"<TOOLCALL>{LISTED}</TOOLCALL>", "<think>\n\n", opened=True),
    "solar": Published(
        SOLAR,
        SOLAR_CALLS,
        "<|think|>",
        "<|end|><|begin|>assistant",
        said=("<|content|>", "<|end|><|begin|>assistant"),
    ),
    "kimi-k2": Published(KIMI, KIMI_CALLS, "<think>", "</think>"),
    "kimi-k3": Published(
        KIMI_K3,
        KIMI_K3_CALLS,
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        opened=True,
        said=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "minimax-m3": Published(MINIMAX_M3, MINIMAX_M3_CALLS, "<mm:think>", "</mm:think>"),
    "generic": Published(PLAIN, IN_WORDS, in_words=True),
}
