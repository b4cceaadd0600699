import asyncio, json, sys
from typing import Literal
from pydantic import BaseModel, Field
import openai
from langchain_openai import ChatOpenAI
base=f"http://127.0.0.1:{sys.argv[1]}/v1"
client=openai.OpenAI(base_url=base, api_key="none", max_retries=0)
model=client.models.list().data[0].id
q=[{"role":"user","content":"What is 478 + 356?"}]
print("openai", openai.__version__)
print("chat:", client.chat.completions.create(model=model,messages=q,temperature=0).choices[0].message.content)
class Sum(BaseModel):
    kind: Literal["sum"]
    value: int = Field(ge=0, le=9999)
    exact: bool
p=client.chat.completions.parse(model=model,messages=q,temperature=0,response_format=Sum)
print("parse:", repr(p.choices[0].message.parsed))
with client.chat.completions.stream(model=model,messages=q,temperature=0,response_format=Sum) as st:
    kinds=[e.type for e in st]; print("stream:", sorted(set(kinds)), repr(st.get_final_completion().choices[0].message.parsed))
tools=[{"type":"function","function":{"name":"add","strict":True,"parameters":{"type":"object","properties":{"a":{"type":"integer"},"unit":{"enum":["K","C"]}},"required":["a","unit"],"additionalProperties":False}}}]
t=client.chat.completions.create(model=model,messages=q,temperature=0,tools=tools,tool_choice="required",parallel_tool_calls=False)
c=t.choices[0].message.tool_calls[0]; print("tool:", t.choices[0].finish_reason, c.function.name, json.loads(c.function.arguments))
out=[]
for ch in client.chat.completions.create(model=model,messages=q,temperature=0,tools=tools,tool_choice={"type":"function","function":{"name":"add"}},stream=True):
    for d in (ch.choices[0].delta.tool_calls or []): out.append((d.index,d.function.name,d.function.arguments))
print("tool stream:", len(out), out[0][1])
async def many():
    a=openai.AsyncOpenAI(base_url=base,api_key="none")
    r=await asyncio.gather(*[a.chat.completions.create(model=model,messages=q,temperature=0) for _ in range(8)])
    print("async:", {x.choices[0].message.content for x in r})
asyncio.run(many())
import langchain_openai, importlib.metadata
print("langchain-openai", importlib.metadata.version("langchain-openai"))
llm=ChatOpenAI(base_url=base,api_key="none",model=model,temperature=0)
print("invoke:", llm.invoke("What is 478 + 356?").content)
print("stream:", "".join(x.content for x in llm.stream("What is 478 + 356?")))
print("structured:", repr(llm.with_structured_output(Sum,method="json_schema").invoke("What is 478 + 356?")))
print("function calling:", repr(llm.with_structured_output(Sum,method="function_calling").invoke("What is 478 + 356?")))
def add(a:int,b:int)->int:
    "Adds."
    return a+b
m=llm.bind_tools([add],tool_choice="add").invoke("What is 478 + 356?")
print("bind_tools:", [ (x["name"],sorted(x["args"])) for x in m.tool_calls])
async def s2():
    r=await llm.abatch(["What is 1 + 2?"]*4); print("abatch:", {x.content for x in r})
asyncio.run(s2())
def text(*texts): return [{"type":"text","text":t} for t in texts]
def ask(*messages,**more): return client.chat.completions.create(model=model,messages=messages,temperature=0,**more).choices[0].message
print("parts:", ask({"role":"user","content":text("What is 478 + 356?")}).content)
print("developer:", ask({"role":"developer","content":text("Be","terse.")},*q).content is not None)
asked=ask(*q,tools=tools,tool_choice="required",parallel_tool_calls=False)
called=asked.model_dump()  # with its null fields
print("tool result:", ask(*q,called,{"role":"tool","tool_call_id":called["tool_calls"][0]["id"],"content":text("834")},tools=tools,max_tokens=9) is not None)
for part in ({"type":"image_url","image_url":{"url":"data:,"}},{"type":"input_audio","input_audio":{"data":"","format":"wav"}}):
    try: ask({"role":"user","content":[part]}); print("taken")
    except openai.BadRequestError as e: print("refused:", e.body["message"])
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
print("langchain messages:", llm.invoke([SystemMessage(text("Be terse.")),HumanMessage(text("What is 478 + 356?")),m,
    *[ToolMessage("834",tool_call_id=c["id"]) for c in m.tool_calls],AIMessage(text("834.")),HumanMessage("What is 1 + 2?")]).content is not None)
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"]="True"
import litellm
print("litellm", importlib.metadata.version("litellm"))
lite=dict(model="openai/"+model,api_base=base,api_key="none",temperature=0)
r=litellm.completion(messages=[{"role":"developer","content":text("Be terse.")},{"role":"user","content":text("What is 478 + 356?")}],**lite)
print("parts and developer:", r.choices[0].message.content is not None)
r=litellm.completion(messages=q,tools=tools,tool_choice="required",**lite).choices[0].message
print("tool result:", litellm.completion(messages=[*q,r,*[{"role":"tool","tool_call_id":c.id,"content":"834"} for c in r.tool_calls]],tools=tools,max_tokens=9,**lite) is not None)
import agents
agents.set_tracing_disabled(True)
print("openai-agents", importlib.metadata.version("openai-agents"))
@agents.function_tool
def plus(a:int,b:int)->str:
    "Adds."
    return str(a+b)
agent=agents.Agent(name="a",instructions="Be terse.",tools=[plus],model=agents.OpenAIChatCompletionsModel(model=model,openai_client=openai.AsyncOpenAI(base_url=base,api_key="none")),
    model_settings=agents.ModelSettings(temperature=0,tool_choice="required"))
r=agents.Runner.run_sync(agent,[{"role":"developer","content":"Be kind."},{"role":"user","content":[{"type":"input_text","text":"What is 478 + 356?"}]}])
print("run with a tool:", sorted({type(i).__name__ for i in r.new_items}))
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
print("pydantic-ai", importlib.metadata.version("pydantic-ai-slim"))
remote=OpenAIChatModel(model,provider=OpenAIProvider(base_url=base,api_key="none"))
plain=Agent(remote,system_prompt=["Be terse.","Be kind."],model_settings={"temperature":0})
r=plain.run_sync(["What is","478 + 356?"]); print("parts:", r.output is not None)
r=plain.run_sync("What is 1 + 2?",message_history=r.all_messages()); print("history:", r.output)
typed=Agent(remote,output_type=Sum,model_settings={"temperature":0})
print("output by a tool:", repr(typed.run_sync("What is 478 + 356?").output))
