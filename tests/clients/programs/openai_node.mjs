// What a user of the npm package `openai` does, at the address and with the keys of the environment. Prints what passed.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The package is where `make check-clients` installed it, which is not beside this file.
const require = createRequire(pathToFileURL(process.env.NODE_PACKAGES + "/"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);

const { MOTET_URL: URL_, MOTET_KEY: KEY, MOTET_LIMITED_KEY: LIMITED } = process.env;
const connect = (apiKey) => new OpenAI({ baseURL: `${URL_}/v1`, apiKey, maxRetries: 0 });
const api = connect(KEY);
const model = "plain";
const messages = [{ role: "user", content: "Is it raining?" }];
const tools = [{ type: "function", function: { name: "look_up", parameters: { type: "object" } } }];
const greedy = { temperature: 0, max_tokens: 64 };
const SAID = "It is dry.";
const space = { 32: -100, 10: -100, 13: -100, 9: -100 }; // optional in JSON, and likely with random weights

const passes = {
  async models_are_listed_and_found() {
    const names = [];
    for await (const one of api.models.list()) names.push(one.id);
    assert.deepEqual(names, ["chained", model]);
    assert.equal((await api.models.retrieve(model)).id, model);
  },
  async a_chat_is_whole_and_streamed() {
    const reply = await api.chat.completions.create({ model, messages, ...greedy });
    assert.equal(reply.choices[0].message.content, SAID);
    const given = { model, messages, stream: true, stream_options: { include_usage: true }, ...greedy };
    let text = "", usage;
    for await (const chunk of await api.chat.completions.create(given)) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, SAID);
    assert.equal(usage.total_tokens, reply.usage.total_tokens);
  },
  async tools_are_called_and_their_results_sent_back() {
    const choice = (await api.chat.completions.create({ model, messages, tools, ...greedy })).choices[0];
    assert.equal(choice.finish_reason, "tool_calls");
    const [call] = choice.message.tool_calls;
    assert.equal(call.function.name, "look_up");
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Oslo" });
    const turns = [...messages, choice.message, { role: "tool", tool_call_id: call.id, content: "rain" }];
    const next = await api.chat.completions.create({ model, messages: turns, tools, ...greedy });
    assert.equal(next.choices[0].message.content, "It rains.");
    const final = await api.chat.completions.stream({ model, messages, tools, ...greedy }).finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
    const city = ({ city }) => `rain in ${city}`;
    const runner = api.chat.completions.runTools({
      model, messages, ...greedy,
      tools: [{ type: "function", function: { name: "look_up", parse: JSON.parse, function: city, parameters: {} } }],
    });
    assert.equal(await runner.finalContent(), "It rains.");
  },
  async a_schema_holds() {
    const schema = { type: "object", properties: { kind: { enum: ["sun", "rain"] } }, required: ["kind"], additionalProperties: false };
    const format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema } };
    const given = { model, messages, response_format: format, seed: 2, max_tokens: 64, logit_bias: space };
    const message = (await api.chat.completions.parse(given)).choices[0].message;
    assert.ok(["sun", "rain"].includes(message.parsed.kind), JSON.stringify(message));
  },
  async logprobs_completions_and_embeddings_are_served() {
    const chat = await api.chat.completions.create({ model, messages, logprobs: true, top_logprobs: 2, ...greedy });
    assert.deepEqual(chat.choices[0].logprobs.content.slice(0, 2).map((each) => each.token), ["It is ", "dry."]);
    const text = await api.completions.create({ model, prompt: ["<|plain|>", "<|result|>"], logprobs: 1, ...greedy });
    assert.deepEqual(text.choices.map((choice) => choice.text), [SAID, "It rains."]);
    const byDefault = (await api.embeddings.create({ model, input: "Hello" })).data[0].embedding;
    const asFloats = (await api.embeddings.create({ model, input: "Hello", encoding_format: "float" })).data[0].embedding;
    byDefault.forEach((value, index) => assert.ok(Math.abs(value - asFloats[index]) < 1e-5));
  },
  async responses_are_whole_and_streamed() {
    const given = { model, input: "Is it raining?", temperature: 0, max_output_tokens: 64 };
    assert.equal((await api.responses.create(given)).output_text, SAID);
    assert.equal((await api.responses.stream(given).finalResponse()).output_text, SAID);
  },
  async refusals_have_the_classes_of_the_package() {
    const create = (given, client = api) => client.chat.completions.create({ model, messages, max_tokens: 4, ...given });
    await assert.rejects(create({ model: "no-such-model" }), (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
    await assert.rejects(create({ temperature: -1 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    await assert.rejects(create({}, connect("wrong")), OpenAI.AuthenticationError);
    const limited = connect(LIMITED);
    await create({ model: "chained" }, limited).catch(() => {}); // another program may have used the minute's request
    await assert.rejects(create({ model: "chained" }, limited), (error) =>
      error instanceof OpenAI.RateLimitError && Number(error.headers.get("retry-after-ms")) > 0 && Number(error.headers.get("retry-after")) > 0);
  },
  async a_stream_that_is_aborted_ends_at_the_server() {
    const stream = await api.chat.completions.create({ model, messages, stream: true, max_tokens: 400, ignore_eos: true });
    for await (const _ of stream) break; // leaving the loop aborts the request
    const numOpen = async () => Number(/^motet_gateway_streams_open (\S+)$/m.exec(await (await fetch(`${URL_}/metrics`)).text())[1]);
    const deadline = Date.now() + 30_000;
    while ((await numOpen()) > 0) assert.ok(Date.now() < deadline, "the stream is still open");
  },
};

for (const [name, run] of Object.entries(passes)) {
  await run();
  console.log("passed", name);
}
const { VERSION } = await import(pathToFileURL(require.resolve("openai/version")).href);
console.log("all passed with openai", VERSION, "of npm");
