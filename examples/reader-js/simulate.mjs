// The time of a step from an annotated job: node simulate.mjs JOB.pb DEVICE CLUSTER
//
// The longest path over what all programs run, by the rules of docs/ir.md: work is in order on the host and on every
// stream of a program, an operation waits for what it reads, and communication waits for all who take part.

import { readFileSync } from "node:fs";
import { parse, Refused } from "./graph.mjs";

class Impossible extends Error {}

// Picoseconds of every row of the operation table: on the device, or over the network; and to issue it.
function timesOf(graph, device, cluster) {
  const index = (name) => graph.message.strings.indexOf(name);
  const last = (op, name) => op.durations.findLast((duration) => duration.device === index(name))?.picoseconds;
  return graph.ops.map((op, row) => {
    const host = last(op, `${device}/host`) ?? 0n;
    if (op.kind.case === "host") return { host: Number(host), work: 0 };
    const work = last(op, device) ?? (communicates(op) ? last(op, cluster) : isView(op) ? 0n : undefined);
    if (work === undefined) {
      throw new Impossible(`operation ${row} (${graph.text(op.name)}) has no duration: annotate the job first`);
    }
    return { host: Number(host), work: Number(work) };
  });
}

function communicates(op) {
  return ["collective", "send", "recv"].includes(op.kind.case);
}

function isView(op) {
  const { flops, bytesRead, bytesWritten } = op.kind.value;
  return op.kind.case === "compute" && flops === 0n && bytesRead === 0n && bytesWritten === 0n;
}

// A task occupies its resource (the host of a program, or one of its streams) for its duration.
class Task {
  constructor(resource, duration, what) {
    Object.assign(this, { resource, duration, what, missing: 0, then: [], ready: 0, end: undefined, meeting: undefined });
    resource.line.push(this);
  }

  after(earlier) {
    earlier.then.push(this);
    this.missing += 1;
  }
}

// Two tasks for every operation of a program: the host issues it, then a stream runs it. Host work is the host's.
function tasksOf(graph, times, number, meetings) {
  const program = graph.message.programs[number];
  const resource = () => ({ line: [], next: 0, free: 0 });
  const host = resource();
  const streams = graph.message.streams.map(resource);
  const [ran, keys] = [new Map(), new Map()];
  for (const { block, instance, microBatch, op: row } of graph.run(program)) {
    const op = graph.ops[row];
    const what = `operation ${row} (${graph.text(op.name)}) of ${program.role || `program ${number}`}`;
    const issued = new Task(host, times[row].host, what);
    const done = new Task(streams[op.stream], times[row].work, what);
    done.after(issued);
    const waits = op.kind.case === "host" ? issued : done;
    for (const earlier of waitsFor(graph, ran, block, instance, microBatch, op)) waits.after(earlier);
    ran.set(`${row} ${instance} ${microBatch}`, done).set(`${row} ${instance}`, done);
    if (!communicates(op)) continue;
    if (!keys.has(row)) keys.set(row, meetingKey(graph, number, op));
    meet(done, keys.get(row), `${number} ${op.kind.case}`, meetings);
  }
  return [host, ...streams];
}

// What an operation waits for on other streams; on its own one it comes after them anyway.
function waitsFor(graph, ran, block, instance, microBatch, op) {
  const sources = op.inputs.map((tensor) => graph.source(block, instance, Number(tensor)));
  const made = sources.filter((source) => source !== undefined && graph.ops[source.op].stream !== op.stream);
  const named = op.deps.map((dep) => ({ op: Number(dep), instance }));
  const last = ({ op, instance }) => ran.get(`${op} ${instance} ${microBatch}`) ?? ran.get(`${op} ${instance}`);
  return [...made, ...named].map(last).filter((task) => task !== undefined);
}

// Puts a communication with those of other programs that it starts together with: the n-th ones under one key.
// A program may hold both ends of a message, each a side of its own: its n-th send meets its n-th receive.
function meet(task, key, side, meetings) {
  if (!meetings.has(key)) meetings.set(key, { counts: new Map(), nth: [] });
  const { counts, nth } = meetings.get(key);
  const n = counts.get(side) ?? 0;
  counts.set(side, n + 1);
  nth[n] ??= { members: [] };
  nth[n].members.push(task);
  task.meeting = nth[n];
}

// A program stands for all ranks of its role: the one of them whose free coordinates are 0 speaks for it.
function meetingKey(graph, number, op) {
  const { group: index, peer, tag } = op.kind.value;
  const group = graph.message.groups[index];
  const { mine, place, size } = placeIn(graph, group, graph.message.programs[number]);
  if (op.kind.case === "collective") return `${index} ${mine}`;
  const there = (place + peer + size) % size;
  const [sender, receiver] = op.kind.case === "send" ? [place, there] : [there, place];
  const axes = graph.axesOf(group);
  const fixed = graph.message.programs[number].coordinates.some(({ axis }) => axes.includes(axis));
  // Along axes on which the role has all places, every rank of it sends as far as it receives from.
  if (axes.length > 0 && !fixed) return `${index} ${mine} ${(receiver - sender + size) % size} ${tag}`;
  return `${index} ${mine} ${sender} to ${receiver} ${tag}`;
}

// The set of ranks of a group that a program is in, by its first rank; its place in it; how many ranks it has.
function placeIn(graph, group, program) {
  const ranks = graph.ranksOf(program);
  const mine = graph.axesOf(group).length > 0 ? members(graph, group, ranks[0]) : group.ranks.map(Number);
  return { mine: mine[0], place: mine.findIndex((rank) => ranks.includes(rank)), size: mine.length };
}

function members(graph, group, rank) {
  let rest = rank;
  const place = new Map();
  for (const { name, size } of graph.message.mesh.toReversed()) {
    place.set(name, rest % Number(size));
    rest = Math.floor(rest / Number(size));
  }
  const all = (axis) => Array.from({ length: Number(axis.size) }, (_, at) => at);
  const axes = graph.axesOf(group);
  return graph.membersAmong(group, graph.ranksAt((axis) => (axes.includes(axis.name) ? all(axis) : [place.get(axis.name)])));
}

// Starts every task when its resource is free, what it waits for has ended, and all who meet are there.
function run(resources) {
  const toServe = [...resources];
  const start = (task, time) => {
    task.end = time + task.duration;
    Object.assign(task.resource, { free: task.end, next: task.resource.next + 1 });
    toServe.push(task.resource);
    for (const later of task.then) {
      later.ready = Math.max(later.ready, task.end);
      later.missing -= 1;
      if (later.missing === 0) toServe.push(later.resource);
    }
  };
  while (toServe.length > 0) {
    const resource = toServe.pop();
    const task = resource.line[resource.next];
    if (task === undefined || task.missing > 0 || task.arrived) continue;
    task.ready = Math.max(task.ready, resource.free);
    task.arrived = true;
    const { members } = task.meeting ?? { members: [task] };
    if (members.every((member) => member.arrived)) {
      const time = Math.max(...members.map((member) => member.ready));
      for (const member of members) start(member, time);
    }
  }
  const stuck = resources.filter(({ line, next }) => next < line.length).map(({ line, next }) => line[next].what);
  if (stuck.length > 0) throw new Impossible(`deadlock: ${stuck.slice(0, 3).join(", ")} wait for ever`);
}

export function simulate(graph, device, cluster) {
  const times = timesOf(graph, device, cluster);
  const meetings = new Map();
  const programs = graph.message.programs.map((_, number) => tasksOf(graph, times, number, meetings));
  run(programs.flat());
  const ends = programs.map((resources) => Math.max(0, ...resources.map(({ free }) => free)));
  const step = Math.max(0, ...ends);
  if (!Number.isSafeInteger(step)) throw new Impossible("the step is over 2^53 picoseconds");
  return {
    step_ps: step,
    tasks: programs.flat().reduce((sum, { line }) => sum + line.length, 0),
    programs: graph.message.programs.map(({ role }, number) => ({ role, end_ps: ends[number] })),
  };
}

if (process.argv[1] === import.meta.filename) {
  const [path, device, cluster] = process.argv.slice(2);
  if (cluster === undefined) {
    console.error("usage: node simulate.mjs JOB.pb DEVICE CLUSTER");
    process.exit(2);
  }
  try {
    console.log(JSON.stringify(simulate(parse(readFileSync(path)), device, cluster)));
  } catch (error) {
    if (!(error instanceof Impossible || error instanceof Refused)) throw error;
    console.error(error.message);
    process.exit(1);
  }
}
