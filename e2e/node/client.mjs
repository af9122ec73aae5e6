// Makes the calls that its argument orders, one after the other, and prints
// what came of each as one line of JSON.
import { APIError, AzureOpenAI, OpenAI, toFile } from "openai";

const order = JSON.parse(process.argv[2]);
const options = { apiKey: "client-key", timeout: 20_000 };
if (order.retries !== undefined) options.maxRetries = order.retries;
const client =
  order.client === "AzureOpenAI"
    ? new AzureOpenAI({ ...options, endpoint: order.url, apiVersion: order.api_version })
    : new OpenAI({ ...options, baseURL: order.url });

const messages = [{ role: "user", content: "Hello?" }];
const input = "Hello?";

const calls = {
  async chat(model) {
    const { data, response } = await client.chat.completions.create({ model, messages }).withResponse();
    const [choice] = data.choices;
    return {
      backend: response.headers.get("x-simulator"),
      text: choice.message.content,
      finish: choice.finish_reason,
      tokens: data.usage.completion_tokens,
    };
  },

  async "streamed chat"(model) {
    const { data, response } = await client.chat.completions
      .create({ model, messages, stream: true, stream_options: { include_usage: true } })
      .withResponse();
    const got = { backend: response.headers.get("x-simulator"), text: "", deltas: 0 };
    for await (const chunk of data) {
      got.tokens = chunk.usage?.completion_tokens ?? got.tokens;
      for (const { delta, finish_reason } of chunk.choices) {
        if (delta.content) {
          got.text += delta.content;
          got.deltas++;
        }
        got.finish = finish_reason ?? got.finish;
      }
    }
    return got;
  },

  async embeddings(model) {
    const { data, response } = await client.embeddings.create({ model, input }).withResponse();
    return { backend: response.headers.get("x-simulator"), dimensions: data.data[0].embedding.length };
  },

  async responses(model) {
    const { data, response } = await client.responses.create({ model, input }).withResponse();
    return {
      backend: response.headers.get("x-simulator"),
      text: data.output_text,
      finish: data.status,
      tokens: data.usage.output_tokens,
    };
  },

  async "streamed responses"(model) {
    const { data, response } = await client.responses.create({ model, input, stream: true }).withResponse();
    const got = { backend: response.headers.get("x-simulator"), text: "", deltas: 0 };
    for await (const event of data) {
      if (event.type === "response.output_text.delta") {
        got.text += event.delta;
        got.deltas++;
      } else if (event.type === "response.completed") {
        got.finish = event.response.status;
        got.tokens = event.response.usage.output_tokens;
      }
    }
    return got;
  },

  async transcription(model) {
    const file = await toFile(Buffer.from("RIFF\x04\0\0\0WAVE\r\n--\xff", "latin1"), "hello.wav", { type: "audio/wav" });
    const { data, response } = await client.audio.transcriptions.create({ model, file }).withResponse();
    return { backend: response.headers.get("x-simulator"), text: data.text };
  },

  async models() {
    const { data, response } = await client.models.list().withResponse();
    return { backend: response.headers.get("x-simulator"), models: data.data.map(({ id }) => id).join(", ") };
  },
};

// pause lets what is in the middle of a call happen: a restart of the balancer.
const pause = async () => {
  if (order.pause) await fetch(order.pause);
};
const jsonl = () => toFile(Buffer.from("{}\n"), "input.jsonl");

Object.assign(calls, {
  async conversation(model) {
    let previous;
    const got = { text: "", deltas: 0 };
    for (let turn = 0; turn < 10; turn++) {
      if (turn === 5) await pause();
      const ask = { model, input, previous_response_id: previous };
      if (turn % 2) {
        for await (const event of await client.responses.create({ ...ask, stream: true })) {
          if (event.type === "response.completed") ({ id: previous } = event.response);
        }
      } else {
        ({ id: previous } = await client.responses.create(ask));
      }
      got.deltas++;
    }
    return got;
  },

  async "stored response"(model) {
    const { id } = await client.responses.create({ model, input, background: true });
    await pause();
    const read = await client.responses.retrieve(id);
    const items = await client.responses.inputItems.list(id);
    const cancelled = await client.responses.cancel(id);
    await client.responses.delete(id);
    return { text: read.output_text, finish: cancelled.status, dimensions: items.data.length };
  },

  async "resumed stream"(model) {
    const got = { text: "", deltas: 0 };
    let id, last;
    for await (const event of await client.responses.create({ model, input, background: true, stream: true })) {
      if (event.type === "response.created") ({ id } = event.response);
      if (event.type === "response.output_text.delta") got.text += event.delta;
      last = event.sequence_number;
      if (got.text && ++got.deltas === 2) break;
    }
    await pause();
    for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: last })) {
      if (event.type === "response.output_text.delta") got.text += event.delta;
      if (event.type === "response.completed") got.finish = event.response.status;
    }
    return got;
  },

  async file(model) {
    const { id } = await client.files.create({ file: await jsonl(), purpose: "user_data" });
    await pause();
    const content = [{ type: "input_file", file_id: id }];
    const { status } = await client.responses.create({ model, input: [{ role: "user", content }] });
    const text = await (await client.files.content(id)).text();
    await client.files.delete(id);
    return { text, finish: status };
  },

  async batch() {
    const file = await client.files.create({ file: await jsonl(), purpose: "batch" });
    const { id } = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/responses", completion_window: "24h" });
    await pause();
    const { status, output_file_id } = await client.batches.retrieve(id);
    return { text: await (await client.files.content(output_file_id)).text(), finish: status };
  },

  async "vector store"(model) {
    const file = await client.files.create({ file: await jsonl(), purpose: "assistants" });
    const { id } = await client.vectorStores.create({ name: "docs", file_ids: [file.id] });
    await pause();
    const { status } = await client.vectorStores.files.create(id, { file_id: file.id });
    const { output_text } = await client.responses.create({ model, input, tools: [{ type: "file_search", vector_store_ids: [id] }] });
    await client.vectorStores.delete(id);
    return { text: output_text, finish: status };
  },
});

const results = [];
for (const { name, model } of order.calls) {
  try {
    results.push(await calls[name](model));
  } catch (err) {
    if (!(err instanceof APIError)) throw err;
    results.push({
      error: {
        class: err.constructor.name,
        status: err.status,
        code: err.code,
        type: err.type,
        message: err.message,
        request_id: err.requestID,
        retry_after: err.headers?.get("retry-after"),
      },
    });
  }
}
console.log(JSON.stringify(results));
