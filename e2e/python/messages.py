"""Makes the calls that its argument orders with Anthropic's SDK, one after the other,
and prints the error of each as one line of JSON."""

import json
import sys

import anthropic

order = json.loads(sys.argv[1])


def error(call):
    client = anthropic.Anthropic(base_url=order["url"], api_key=call["key"], max_retries=0, timeout=20)
    question = {"model": call["model"], "messages": [{"role": "user", "content": "x" * call["length"]}]}
    try:
        if call["counts"]:
            client.messages.count_tokens(**question)
        else:
            client.messages.create(max_tokens=5, **question)
    except anthropic.APIStatusError as e:
        return {
            "class": type(e).__name__,
            "status": e.status_code,
            "type": e.type,
            "code": e.error_code,
            "message": e.api_message,
            "request_id": e.request_id,
            "retry_after": e.response.headers.get("retry-after", ""),
        }
    return {}


print(json.dumps([error(call) for call in order["calls"]]))
