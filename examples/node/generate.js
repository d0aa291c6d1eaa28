// Streams one completion of an adapter from Node, without generated code: the .proto files are read when it starts.
// Setup: npm install --prefix examples/node
// Run: node examples/node/generate.js legal "The party of the first part"

const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const protos = path.join(__dirname, "..", "..", "protos");
const definition = protoLoader.loadSync("motet/v1/generation.proto", { includeDirs: [protos], defaults: true, oneofs: true });
const { motet } = grpc.loadPackageDefinition(definition);

const [adapter, text] = process.argv.slice(2);
const address = process.env.MOTET_SERVER || "127.0.0.1:50051";
const client = new motet.v1.GenerationService(address, grpc.credentials.createInsecure());
const stream = client.Generate({ adapter, text, stopping: { maxTokens: 64 } });

stream.on("data", (response) => {
  if (response.event === "started") console.log("version", response.started.adapterDigest.slice(0, 12));
  if (response.event === "delta") process.stdout.write(response.delta.text);
  if (response.event === "finished") console.log("\n%d tokens", response.finished.usage.completionTokens);
});
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`); // rich details: docs/errors.md
  process.exitCode = 1;
});
stream.on("close", () => client.close());
