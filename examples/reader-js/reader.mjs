// Prints what is in workload graphs: node reader.mjs FILE...

import { readFileSync } from "node:fs";
import { parse, Refused } from "./graph.mjs";
import { summarise } from "./summary.mjs";

export function read(path) {
  try {
    return summarise(parse(readFileSync(path)));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { error: error.reason };
  }
}

if (process.argv[1] === import.meta.filename) {
  if (process.argv.length < 3) {
    console.error("usage: node reader.mjs FILE...");
    process.exitCode = 2;
  }
  for (const path of process.argv.slice(2)) console.log(JSON.stringify(read(path), null, 1));
}
