"""Makes the calls that its argument orders, one after the other, with LangChain
or LiteLLM, and prints what came of each as one line of JSON."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no prices from the internet
order = json.loads(sys.argv[1])
question = "What is the weather in Paris?"
weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def finish(message):
    """Returns why a message of LangChain's ends, in the words of either API."""
    return message.response_metadata.get("finish_reason") or message.response_metadata.get("status")


class LangChain:
    def __init__(self, azure):
        self.azure = azure

    def made(self, kind, key="client-key-of-alice", **options):
        options |= {"max_retries": 0, "timeout": 20, "api_key": key}
        if self.azure:
            deployment = options.pop("model", "gpt-4o")
            options |= {"azure_endpoint": order["url"], "api_version": order["api_version"], "azure_deployment": deployment}
            return getattr(langchain_openai, "Azure" + kind)(**options)
        return getattr(langchain_openai, kind)(base_url=order["url"], **({"model": "gpt-4o"} | options))

    def chat(self, **options):
        message = self.made("ChatOpenAI", **options).invoke(question)
        return {
            "text": message.text,
            "finish": finish(message),
            "tokens": message.usage_metadata["output_tokens"],
        }

    def streamed_chat(self, **options):
        pieces = [piece for piece in self.made("ChatOpenAI", stream_usage=True, **options).stream(question)]
        said = [piece.text for piece in pieces if piece.text]
        whole = sum(pieces[1:], pieces[0])
        return {
            "text": "".join(said),
            "deltas": len(said),
            "finish": finish(whole),
            "tokens": whole.usage_metadata["output_tokens"],
        }

    def responses(self):
        return self.chat(use_responses_api=True)

    def streamed_responses(self):
        return self.streamed_chat(use_responses_api=True)

    def tools(self):
        return self.loop(self.made("ChatOpenAI").bind_tools([weather]).invoke)

    def streamed_tools(self, **options):
        model = self.made("ChatOpenAI", **options).bind_tools([weather])

        def ask(messages):
            pieces = list(model.stream(messages))
            return sum(pieces[1:], pieces[0])

        return self.loop(ask)

    def streamed_tools_in_responses(self):
        return self.streamed_tools(use_responses_api=True)

    def loop(self, ask):
        messages, got = [("user", question)], ""
        while True:
            message = ask(messages)
            if not message.tool_calls:
                return {"text": got + message.text, "finish": finish(message)}
            messages.append(message)
            for call in message.tool_calls:
                got += f"{call['name']} in {call['args']['city']}: "
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})

    def embeddings(self):
        # without it, the length is checked with tables from the internet
        embedder = self.made("OpenAIEmbeddings", model="embedder", dimensions=64, check_embedding_ctx_length=False)
        return {"dimensions": len(embedder.embed_query(question))}

    def other_dialect(self):
        return self.chat(model="elsewhere")

    def throttled(self):
        return self.chat(model="busy")

    def wrong_key(self):
        return self.chat(key="another-key")


class LiteLLM:
    def __init__(self, azure):
        self.azure = azure

    def to(self, model="gpt-4o", key="client-key-of-alice"):
        options = {"api_base": order["url"], "api_key": key, "max_retries": 0, "timeout": 20}
        if self.azure:
            return options | {"model": "azure/" + model, "api_version": order["api_version"]}
        return options | {"model": "openai/" + model}

    def chat(self, **options):
        done = litellm.completion(messages=[{"role": "user", "content": question}], **self.to(**options))
        choice = done.choices[0]
        return {"text": choice.message.content, "finish": choice.finish_reason, "tokens": done.usage.completion_tokens}

    def streamed_chat(self):
        messages = [{"role": "user", "content": question}]
        got = {"text": "", "deltas": 0}
        for chunk in litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **self.to()):
            if getattr(chunk, "usage", None):
                got["tokens"] = chunk.usage.completion_tokens
            for choice in chunk.choices:
                if choice.delta.content:
                    got["text"] += choice.delta.content
                    got["deltas"] += 1
                got["finish"] = choice.finish_reason or got.get("finish")
        return got

    def responses(self):
        done = litellm.responses(input=question, **self.to())
        text = "".join(part.text for item in done.output for part in item.content)
        return {"text": text, "finish": done.status, "tokens": done.usage.output_tokens}

    def streamed_responses(self):
        got = {"text": "", "deltas": 0}
        for event in litellm.responses(input=question, stream=True, **self.to()):
            if event.type == "response.output_text.delta":
                got["text"] += event.delta
                got["deltas"] += 1
            elif event.type == "response.completed":
                got["finish"], got["tokens"] = event.response.status, event.response.usage.output_tokens
        return got

    def streamed_tools_in_responses(self):
        messages, got = [{"role": "user", "content": question}], ""
        tool = {"type": "function"} | weather["function"]
        while True:
            stream = litellm.responses(input=messages, tools=[tool], stream=True, **self.to())
            done = [event.response for event in stream if event.type == "response.completed"][0]
            calls = [item for item in done.output if item.type == "function_call"]
            if not calls:
                return {"text": got + done.output[-1].content[0].text, "finish": done.status}
            for call in calls:
                got += f"{call.name} in {json.loads(call.arguments)['city']}: "
                sent = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
                messages += [sent, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]

    def tools(self):
        return self.loop(lambda messages: litellm.completion(messages=messages, tools=[weather], **self.to()))

    def streamed_tools(self):
        def ask(messages):
            return litellm.stream_chunk_builder(list(litellm.completion(messages=messages, tools=[weather], stream=True, **self.to())))

        return self.loop(ask)

    def loop(self, ask):
        messages, got = [{"role": "user", "content": question}], ""
        while True:
            choice = ask(messages).choices[0]
            if not choice.message.tool_calls:
                return {"text": got + choice.message.content, "finish": choice.finish_reason}
            messages.append(choice.message)
            for call in choice.message.tool_calls:
                got += f"{call.function.name} in {json.loads(call.function.arguments)['city']}: "
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})

    def embeddings(self):
        done = litellm.embedding(input=[question], dimensions=64, allowed_openai_params=["dimensions"], **self.to("embedder"))
        return {"dimensions": len(done.data[0]["embedding"])}

    def other_dialect(self):
        return self.chat(model="elsewhere")

    def throttled(self):
        return self.chat(model="busy")

    def wrong_key(self):
        return self.chat(key="another-key")


if order["client"].startswith("LiteLLM"):
    import litellm

    litellm.suppress_debug_info = True
    client = LiteLLM(azure=order["client"].endswith("for Azure"))
else:
    import langchain_openai

    client = LangChain(azure=order["client"] == "AzureChatOpenAI")


def outcome(call):
    try:
        return getattr(client, call["name"].replace(" ", "_"))()
    except Exception as err:
        if not getattr(err, "status_code", None):
            raise
        return {"error": {"class": type(err).__name__, "status": err.status_code}}


print(json.dumps([outcome(call) for call in order["calls"]]))
