"""Makes the calls that its argument orders, one after the other, and prints
what came of each as one line of JSON."""

import json
import sys

import openai

order = json.loads(sys.argv[1])
options = {"api_key": "client-key", "timeout": 20}
if "retries" in order:
    options["max_retries"] = order["retries"]
if order["client"] == "AzureOpenAI":
    client = openai.AzureOpenAI(azure_endpoint=order["url"], api_version=order["api_version"], **options)
else:
    client = openai.OpenAI(base_url=order["url"] + "/v1", **options)

messages = [{"role": "user", "content": "Hello?"}]
model, question = order["model"], "Hello?"


def chat():
    raw = client.chat.completions.with_raw_response.create(model=model, messages=messages)
    completion = raw.parse()
    return {
        "backend": raw.headers["x-simulator"],
        "text": completion.choices[0].message.content,
        "finish": completion.choices[0].finish_reason,
        "tokens": completion.usage.completion_tokens,
    }


def streamed_chat():
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}
    )
    got = {"backend": raw.headers["x-simulator"], "text": "", "deltas": 0}
    for chunk in raw.parse():
        if chunk.usage:
            got["tokens"] = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                got["text"] += choice.delta.content
                got["deltas"] += 1
            if choice.finish_reason:
                got["finish"] = choice.finish_reason
    return got


def embeddings():
    raw = client.embeddings.with_raw_response.create(model=model, input=question)
    return {"backend": raw.headers["x-simulator"], "dimensions": len(raw.parse().data[0].embedding)}


def responses():
    raw = client.responses.with_raw_response.create(model=model, input=question)
    response = raw.parse()
    return {
        "backend": raw.headers["x-simulator"],
        "text": response.output_text,
        "finish": response.status,
        "tokens": response.usage.output_tokens,
    }


def streamed_responses():
    raw = client.responses.with_raw_response.create(model=model, input=question, stream=True)
    got = {"backend": raw.headers["x-simulator"], "text": "", "deltas": 0}
    for event in raw.parse():
        if event.type == "response.output_text.delta":
            got["text"] += event.delta
            got["deltas"] += 1
        elif event.type == "response.completed":
            got["finish"] = event.response.status
            got["tokens"] = event.response.usage.output_tokens
    return got


def outcome(call):
    try:
        return globals()[call.replace(" ", "_")]()
    except openai.APIStatusError as err:
        return {
            "error": {
                "class": type(err).__name__,
                "status": err.status_code,
                "code": err.code,
                "type": err.type,
                "request_id": err.request_id,
                "retry_after": err.response.headers.get("retry-after"),
            }
        }


print(json.dumps([outcome(call) for call in order["calls"]]))
