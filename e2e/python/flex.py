"""Asks for flex and, right after it, without a service tier: argument 1 is the base URL, 2 how often. Prints as JSON
which service tiers served, and how long requests without a service tier took, in seconds."""

import collections
import json
import sys
import time

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="any", timeout=20, max_retries=0)


def ask(**tier):
    return client.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "Hello"}], **tier).service_tier


flex, default, took = collections.Counter(), collections.Counter(), []
for _ in range(int(sys.argv[2])):
    flex[ask(service_tier="flex")] += 1
    began = time.monotonic()
    default[ask()] += 1
    took.append(time.monotonic() - began)
    time.sleep(1.1)  # a refusal of flex counts for a second
print(json.dumps({"flex": flex, "default": default, "took": took}))
