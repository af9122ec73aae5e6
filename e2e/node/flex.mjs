// Asks for flex and, right after it, without a service tier: argument 1 is the base URL, 2 how often. Prints as JSON
// which service tiers served, and how long requests without a service tier took, in seconds.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", timeout: 20_000, maxRetries: 0 });

async function ask(tier, into) {
  const reply = await client.chat.completions.create({ model: "gpt-5", messages: [{ role: "user", content: "Hello" }], ...tier });
  into[reply.service_tier] = (into[reply.service_tier] ?? 0) + 1;
}

const outcome = { flex: {}, default: {}, took: [] };
for (let i = 0; i < Number(process.argv[3]); i++) {
  await ask({ service_tier: "flex" }, outcome.flex);
  const began = performance.now();
  await ask({}, outcome.default);
  outcome.took.push((performance.now() - began) / 1000);
  await new Promise((resolve) => setTimeout(resolve, 1100)); // a refusal of flex counts for a second
}
console.log(JSON.stringify(outcome));
