"""Uses objects together that it made one after the other, with the SDK's own helpers: argument 1 is the base URL,
2 how often. Prints what came of each kind of use as JSON: how often it worked, and the first error."""

import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="right-key-of-alice", timeout=20)
model = "gpt-4o"


def upload(name):
    return client.files.create(file=(name, b"text"), purpose="user_data").id


def ask(*files, **options):
    content = [{"type": "input_text", "text": "Hello?"}] + [{"type": "input_file", "file_id": file} for file in files]
    return client.responses.create(model=model, input=[{"role": "user", "content": content}], **options).id


def file_of_a_vector_store():
    store = client.vector_stores.create(name="store")
    assert client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=("a.txt", b"text")).status == "completed"


def files_of_a_vector_store():
    store = client.vector_stores.create(name="store")
    files = [("a.txt", b"text"), ("b.txt", b"text")]
    assert client.vector_stores.file_batches.upload_and_poll(vector_store_id=store.id, files=files).status == "completed"


def assistant_thread_and_run():
    assistant = client.beta.assistants.create(model=model)
    thread = client.beta.threads.create()
    client.beta.threads.messages.create(thread.id, role="user", content="Hello?")
    assert client.beta.threads.runs.create_and_poll(thread_id=thread.id, assistant_id=assistant.id).status == "completed"


def thread_assistant_and_run():
    thread = client.beta.threads.create()
    assistant = client.beta.assistants.create(model=model)
    assert client.beta.threads.runs.create_and_poll(thread_id=thread.id, assistant_id=assistant.id).status == "completed"


def conversation_and_file():
    conversation = client.conversations.create()
    ask(upload("a.txt"), conversation=conversation.id)


def file_and_conversation():
    file = upload("a.txt")
    ask(file, conversation=client.conversations.create().id)


def previous_response_and_file():
    previous = ask()
    ask(upload("a.txt"), previous_response_id=previous)


def file_and_previous_response():
    file = upload("a.txt")
    ask(file, previous_response_id=ask())


def two_files_and_response():
    ask(upload("a.txt"), upload("b.txt"))


def container_and_file():
    container = client.containers.create(name="container")
    client.containers.files.create(container.id, file_id=upload("a.txt"))


uses = sys.argv[3:] or [
    "file_of_a_vector_store", "files_of_a_vector_store", "assistant_thread_and_run", "thread_assistant_and_run", "conversation_and_file",
    "file_and_conversation", "previous_response_and_file", "file_and_previous_response", "two_files_and_response", "container_and_file",
]
result = {}
for use in uses:
    worked, error = 0, ""
    for _ in range(int(sys.argv[2])):
        try:
            globals()[use]()
            worked += 1
        except Exception as e:  # whatever the SDK raises
            error = error or f"{type(e).__name__}: {e}"[:300]
    result[use] = {"worked": worked, "error": error}
print(json.dumps(result))
