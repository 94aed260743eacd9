// The worker of decode_peers.py for llama.cpp, through node-llama-cpp: same lines in and out as peer_engines.py.
// usage: node peer_llama.mjs FOLDER_WITH_NODE_MODULES MODEL.gguf THREADS

import {readFileSync} from "node:fs";
import {createInterface} from "node:readline";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const [, , home, modelPath, threadsText] = process.argv;
const threads = Number(threadsText);
const folder = join(home, "node_modules", "node-llama-cpp");
const {version} = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
const {getLlama} = await import(pathToFileURL(join(folder, "dist", "index.js")).href);

const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logger: (_, text) => console.error(text)});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({contextSize: 2048, threads});
const sequence = context.getSequence();
const answer = (content) => process.stdout.write(JSON.stringify(content) + "\n");

async function generate(prompt, newTokens) {
    await sequence.clearHistory();
    const start = performance.now();
    let first = start;
    const tokens = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        if (tokens.push(token) === 1) first = performance.now();
        if (tokens.length === newTokens) break;
    }
    return {tokens, prefill_seconds: (first - start) / 1e3, decode_seconds: (performance.now() - first) / 1e3};
}

answer({versions: {"node-llama-cpp": version, "llama.cpp": llama.llamaCppRelease.release}});
for await (const line of createInterface({input: process.stdin})) {
    const request = JSON.parse(line);
    const before = process.cpuUsage();
    const result = await generate(request.prompt, request.new_tokens);
    const {user, system} = process.cpuUsage(before);
    answer({...result, cpu_seconds: (user + system) / 1e6});
}
process.exit(0);
