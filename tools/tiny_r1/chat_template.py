"""The chat format of DeepSeek-R1 as a Jinja template, written for tiny-r1.

System messages come first, joined by blank lines. Earlier answers lose their reasoning (everything up to the last
</think>). The generation prompt opens the reasoning: `<｜Assistant｜><think>\\n`. Tool calls and results are written as in R1.
Newlines and indentation here are for the reader; every tag trims the white space around it, so only the quoted text is
output.
"""

_SOURCE = r"""
{%- if add_generation_prompt is not defined -%}{%- set add_generation_prompt = false -%}{%- endif -%}
{%- set ns = namespace(system='', has_system=false, after_tool=false) -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- if ns.has_system -%}
      {%- set ns.system = ns.system + '\n\n' + message['content'] -%}
    {%- else -%}
      {%- set ns.system = message['content'] -%}
      {%- set ns.has_system = true -%}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{{- ns.system -}}
{%- for message in messages -%}
  {%- if message['role'] == 'tool' -%}
    {{- '\n' if ns.after_tool else '<｜tool▁outputs▁begin｜>' -}}
    {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' -}}
    {%- set ns.after_tool = true -%}
  {%- elif message['role'] == 'user' -%}
    {%- if ns.after_tool -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- endif -%}
    {%- set ns.after_tool = false -%}
    {{- '<｜User｜>' + message['content'] -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' -}}
    {%- set ns.after_tool = false -%}
    {%- if message['content'] -%}{{- message['content'].split('</think>')[-1] -}}{%- endif -%}
    {%- if message['tool_calls'] -%}
      {{- '<｜tool▁calls▁begin｜>' -}}
      {%- for call in message['tool_calls'] -%}
        {%- if not loop.first -%}{{- '\n' -}}{%- endif -%}
        {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] -}}
        {{- '\n```json\n' + call['function']['arguments'] + '\n```<｜tool▁call▁end｜>' -}}
      {%- endfor -%}
      {{- '<｜tool▁calls▁end｜>' -}}
    {%- endif -%}
    {{- '<｜end▁of▁sentence｜>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if ns.after_tool -%}
  {{- '<｜tool▁outputs▁end｜>' -}}
{%- elif add_generation_prompt -%}
  {{- '<｜Assistant｜><think>\n' -}}
{%- endif -%}
"""

CHAT_TEMPLATE = _SOURCE.strip()
