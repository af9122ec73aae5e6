"""Makes the calls that its argument orders, one after the other, and prints
what came of each as one line of JSON."""

import json
import sys
import urllib.request

import openai

order = json.loads(sys.argv[1])
options = {"api_key": "client-key", "timeout": 20}
if "retries" in order:
    options["max_retries"] = order["retries"]
if order["client"] == "AzureOpenAI":
    client = openai.AzureOpenAI(azure_endpoint=order["url"], api_version=order["api_version"], **options)
else:
    client = openai.OpenAI(base_url=order["url"], **options)

messages = [{"role": "user", "content": "Hello?"}]
question = "Hello?"


def chat(model):
    raw = client.chat.completions.with_raw_response.create(model=model, messages=messages)
    completion = raw.parse()
    return {
        "backend": raw.headers["x-simulator"],
        "text": completion.choices[0].message.content,
        "finish": completion.choices[0].finish_reason,
        "tokens": completion.usage.completion_tokens,
    }


def streamed_chat(model):
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


def embeddings(model):
    raw = client.embeddings.with_raw_response.create(model=model, input=question)
    return {"backend": raw.headers["x-simulator"], "dimensions": len(raw.parse().data[0].embedding)}


def responses(model):
    raw = client.responses.with_raw_response.create(model=model, input=question)
    response = raw.parse()
    return {
        "backend": raw.headers["x-simulator"],
        "text": response.output_text,
        "finish": response.status,
        "tokens": response.usage.output_tokens,
    }


def streamed_responses(model):
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


def transcription(model):
    file = ("hello.wav", b"RIFF\x04\0\0\0WAVE\r\n--\xff", "audio/wav")
    raw = client.audio.transcriptions.with_raw_response.create(model=model, file=file)
    return {"backend": raw.headers["x-simulator"], "text": raw.parse().text}


def models(_):
    raw = client.models.with_raw_response.list()
    return {"backend": raw.headers.get("x-simulator"), "models": ", ".join(m.id for m in raw.parse().data)}


def pause():
    """Lets what is in the middle of a call happen: a restart of the balancer."""
    if order.get("pause"):
        urllib.request.urlopen(order["pause"]).read()


jsonl = ("input.jsonl", b"{}\n")


def conversation(model):
    previous = openai.omit
    for turn in range(10):
        if turn == 5:
            pause()
        if turn % 2:
            for event in client.responses.create(model=model, input=question, previous_response_id=previous, stream=True):
                if event.type == "response.completed":
                    previous = event.response.id
        else:
            previous = client.responses.create(model=model, input=question, previous_response_id=previous).id
    return {"deltas": 10}


def stored_response(model):
    response = client.responses.create(model=model, input=question, background=True)
    pause()
    read = client.responses.retrieve(response.id)
    items = client.responses.input_items.list(response.id)
    cancelled = client.responses.cancel(response.id)
    client.responses.delete(response.id)
    return {"text": read.output_text, "finish": cancelled.status, "dimensions": len(items.data)}


def resumed_stream(model):
    got = {"text": "", "deltas": 0}
    with client.responses.create(model=model, input=question, background=True, stream=True) as stream:
        for event in stream:
            if event.type == "response.created":
                response = event.response.id
            if event.type == "response.output_text.delta":
                got["text"] += event.delta
            last = event.sequence_number
            if got["text"]:
                got["deltas"] += 1
            if got["deltas"] == 2:
                break
    pause()
    for event in client.responses.retrieve(response, stream=True, starting_after=last):
        if event.type == "response.output_text.delta":
            got["text"] += event.delta
        if event.type == "response.completed":
            got["finish"] = event.response.status
    return got


def file(model):
    made = client.files.create(file=jsonl, purpose="user_data")
    pause()
    content = [{"type": "input_file", "file_id": made.id}]
    response = client.responses.create(model=model, input=[{"role": "user", "content": content}])
    text = client.files.content(made.id).text
    client.files.delete(made.id)
    return {"text": text, "finish": response.status}


def batch(_):
    made = client.files.create(file=jsonl, purpose="batch")
    job = client.batches.create(input_file_id=made.id, endpoint="/v1/responses", completion_window="24h")
    pause()
    job = client.batches.retrieve(job.id)
    return {"text": client.files.content(job.output_file_id).text, "finish": job.status}


def vector_store(model):
    made = client.files.create(file=jsonl, purpose="assistants")
    store = client.vector_stores.create(name="docs", file_ids=[made.id])
    pause()
    added = client.vector_stores.files.create(store.id, file_id=made.id)
    tools = [{"type": "file_search", "vector_store_ids": [store.id]}]
    response = client.responses.create(model=model, input=question, tools=tools)
    client.vector_stores.delete(store.id)
    return {"text": response.output_text, "finish": added.status}


def outcome(call):
    try:
        return globals()[call["name"].replace(" ", "_")](call["model"])
    except openai.APIStatusError as err:
        return {
            "error": {
                "class": type(err).__name__,
                "status": err.status_code,
                "code": err.code,
                "type": err.type,
                "message": err.message,
                "request_id": err.request_id,
                "retry_after": err.response.headers.get("retry-after"),
            }
        }


print(json.dumps([outcome(call) for call in order["calls"]]))
