// What is in a graph, in the words of the conformance files. Sums that may exceed 2^53 are decimal strings.

import { Level, Phase, TensorRole } from "./generated/workload_pb.js";

export function summarise(graph) {
  const { message } = graph;
  const totals = { work: new Map(), picoseconds: new Map() };
  const programs = message.programs.map((program) => summariseProgram(graph, program, totals));
  return {
    format: `${message.formatMajor}.${message.formatMinor}`,
    level: Level[message.level].toLowerCase(),
    name: message.name,
    producer: message.producer,
    model: message.workload?.model ?? "",
    parameters: String(message.workload?.parameters ?? 0),
    world_size: graph.worldSize,
    unknown_bytes: (message.$unknown ?? []).reduce((sum, field) => sum + tagBytes(field.no) + field.data.length, 0),
    streams: message.streams,
    tensors: graph.tensors.map(
      (t) => `${graph.dtype(t).toLowerCase()}[${t.shape.join(",")}] ${TensorRole[t.role].toLowerCase()} ${graph.bytes(t)}`,
    ),
    kinds: countBy(graph.ops.map((op) => op.kind.case)),
    blocks: graph.blocks.map((block) => ({
      name: block.name,
      tensors: block.rows.length,
      ports: block.ports.length,
      operations: Number(block.message.opEnd - block.message.opBegin),
      instances: block.instances.map((instance) => instance.label),
    })),
    groups: message.groups.map((group) => ({ name: group.name, members: graph.membersOf(group) })),
    unfolded_operations: programs.reduce((sum, program) => sum + program.operations.length, 0),
    work: decimal(totals.work),
    picoseconds: decimal(totals.picoseconds),
    programs,
  };
}

// A row for each operation that runs: name, module, micro-batch, and where in the program its inputs were made.
function summariseProgram(graph, program, totals) {
  const ran = new Map();
  const operations = [];
  for (const { block, instance, microBatch, op: row } of graph.run(program)) {
    const op = graph.ops[row];
    count(graph, op, totals);
    const madeAt = op.inputs.map((tensor) => {
      const source = graph.source(block, instance, Number(tensor));
      if (source === undefined) return null;
      const key = `${source.op} ${source.instance}`;
      return ran.get(`${key} ${microBatch}`) ?? (graph.isPersistent(source.tensor) ? (ran.get(key) ?? -1) : -1);
    });
    const label = graph.blocks[block].instances[instance].label;
    const module = graph.text(op.module);
    ran.set(`${row} ${instance} ${microBatch}`, operations.length);
    ran.set(`${row} ${instance}`, operations.length);
    operations.push([graph.text(op.name), block > 0 ? module.replaceAll("{}", label) : module, microBatch, madeAt]);
  }
  return { role: program.role, ranks: graph.ranksOf(program), operations };
}

function count(graph, op, { work, picoseconds }) {
  if (op.kind.case === "compute") {
    const phase = Phase[op.phase].toLowerCase();
    const { flops, bytesRead, bytesWritten } = op.kind.value;
    add(work, `${phase} flops`, flops);
    add(work, `${phase} bytes_read`, bytesRead);
    add(work, `${phase} bytes_written`, bytesWritten);
  }
  for (const duration of op.durations) add(picoseconds, graph.text(duration.device), duration.picoseconds);
}

function add(totals, key, value) {
  totals.set(key, (totals.get(key) ?? 0n) + value);
}

function decimal(totals) {
  return Object.fromEntries([...totals].map(([key, value]) => [key, String(value)]));
}

function countBy(words) {
  const counts = {};
  for (const word of words) counts[word] = (counts[word] ?? 0) + 1;
  return counts;
}

function tagBytes(number) {
  return Math.ceil((32 - Math.clz32(number << 3)) / 7);
}
