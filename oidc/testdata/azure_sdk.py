"""Chats with Azure's client, which takes its tokens from a function. Reads a JSON object: url, and the tokens that the
function returns, one for each request. Prints what came of each request as JSON."""

import json
import sys

import openai

order = json.load(sys.stdin)
tokens = iter(order["tokens"])
client = openai.AzureOpenAI(
    azure_endpoint=order["url"], api_version="2024-10-21", azure_ad_token_provider=lambda: next(tokens), max_retries=0, timeout=20
)


def chat(stream):
    try:
        answer = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "Hello?"}], stream=stream)
        if not stream:
            return {"text": answer.choices[0].message.content}
        return {"text": "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)}
    except openai.APIStatusError as error:
        return {"error": type(error).__name__, "status": error.status_code, "code": error.code}


print(json.dumps([chat(stream=i % 2 == 1) for i in range(len(order["tokens"]))]))
