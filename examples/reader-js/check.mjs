// Compares what this reader finds in conformance files with the .json beside each: node check.mjs FOLDER

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { read } from "./reader.mjs";

const folder = process.argv[2];
const names = readdirSync(folder).filter((name) => name.endsWith(".pb"));
assert.ok(names.length > 0, `no conformance file in ${folder}`);
for (const name of names) {
  const expected = JSON.parse(readFileSync(join(folder, name.replace(/\.pb$/, ".json")), "utf8"));
  assert.deepStrictEqual(read(join(folder, name)), expected, name);
}
console.log(`${names.length} conformance files read as expected`);
