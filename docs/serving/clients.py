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
