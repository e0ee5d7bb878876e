// A workload graph from the bytes of its file, and the few rules that docs/ir.md adds to the schema.

import { crc32 } from "node:zlib";
import { fromBinary } from "@bufbuild/protobuf";
import { DType, GraphSchema, TensorRole } from "./generated/workload_pb.js";

const MAJOR = 2;
const CHECKSUM_BYTES = 6;
const ELEMENT_BITS = {
  FP32: 32, FP16: 16, BF16: 16, FP64: 64, FP8_E4M3: 8, FP8_E5M2: 8, INT64: 64, INT32: 32, INT16: 16, INT8: 8, UINT8: 8,
  BOOL: 8, COMPLEX64: 64, FP4_E2M1: 4,
};
const PERSISTENT = [TensorRole.PARAMETER, TensorRole.GRADIENT, TensorRole.OPTIMIZER_STATE, TensorRole.BUFFER];

export class Refused extends Error {
  constructor(reason, message) {
    super(message);
    this.reason = reason;
  }
}

export function parse(bytes) {
  checkChecksum(bytes);
  const message = fromBinary(GraphSchema, bytes);
  if (message.magic !== "echograph") throw new Refused("corrupted", "not a workload graph");
  if (message.formatMajor > MAJOR) throw new Refused("newer", `format ${message.formatMajor} is newer than ${MAJOR}`);
  return new Graph(message);
}

// The last field, number 2047 as fixed32, is the CRC-32 of everything before it.
function checkChecksum(bytes) {
  const end = bytes.length - CHECKSUM_BYTES;
  if (end < 0 || bytes[end] !== 0xfd || bytes[end + 1] !== 0x7f) {
    throw new Refused("truncated", "the file does not end with a checksum");
  }
  const stored = new DataView(bytes.buffer, bytes.byteOffset + end + 2, 4).getUint32(0, true);
  if (crc32(bytes.subarray(0, end)) !== stored) throw new Refused("corrupted", "the checksum does not match");
}

export class Graph {
  constructor(message) {
    this.message = message;
    this.tensors = message.tensorChunks.flatMap((chunk) => chunk.tensors);
    this.ops = message.opChunks.flatMap((chunk) => chunk.ops);
    if (BigInt(this.tensors.length) !== message.tensorCount || BigInt(this.ops.length) !== message.opCount) {
      throw new Refused("truncated", "operations or tensors are missing");
    }
    this.blocks = message.blocks.map((block) => this.#block(block));
    let firstId = 0;
    for (const block of this.blocks) {
      block.firstId = firstId;
      firstId += block.own.length * block.instances.length;
    }
    this.maker = new Array(this.tensors.length).fill(undefined);
    this.ops.forEach((op, row) => op.outputs.forEach((tensor) => (this.maker[Number(tensor)] = row)));
  }

  #block(message) {
    const rows = range(Number(message.tensorBegin), Number(message.tensorEnd));
    const ports = rows.filter((row) => this.tensors[row].port);
    const own = rows.filter((row) => !this.tensors[row].port);
    return { name: message.name, rows, ports, own, message, instances: message.instances };
  }

  text(index) {
    return this.message.strings[index];
  }

  dtype(tensor) {
    return DType[tensor.dtype].replace("DTYPE_", "");
  }

  bytes(tensor) {
    const bits = tensor.shape.reduce((product, extent) => product * extent, BigInt(ELEMENT_BITS[this.dtype(tensor)]));
    return (bits + 7n) / 8n;
  }

  isPersistent(row) {
    return PERSISTENT.includes(this.tensors[row].role);
  }

  // Where the value of a tensor comes from: {block, instance, op, tensor}, or undefined for an input of the graph.
  source(block, instance, row) {
    for (;;) {
      if (this.maker[row] !== undefined) return { block, instance, op: this.maker[row], tensor: row };
      const tensor = this.tensors[row];
      if (tensor.port) {
        const port = this.blocks[block].ports.indexOf(row);
        ({ block, instance, row } = this.locate(Number(this.blocks[block].instances[instance].bindings[port])));
      } else if (tensor.aliasOf !== undefined) {
        row = Number(tensor.aliasOf);
      } else {
        return undefined;
      }
    }
  }

  // The block, instance and table row that a tensor id stands for.
  locate(id) {
    const block = this.blocks.findLastIndex((b) => b.own.length * b.instances.length > 0 && b.firstId <= id);
    const { firstId, own } = this.blocks[block];
    return { block, instance: Math.floor((id - firstId) / own.length), row: own[(id - firstId) % own.length] };
  }

  // The operations of a program in the order in which they run.
  *run(program) {
    for (let call = 0; call < program.block.length; call++) {
      const [block, instance, microBatch] = [program.block, program.instance, program.microBatch].map((column) =>
        Number(column[call]),
      );
      for (let op = Number(program.begin[call]); op < Number(program.end[call]); op++) {
        yield { block, instance, microBatch, op };
      }
    }
  }

  get worldSize() {
    const { mesh, programs } = this.message;
    if (mesh.length > 0) return mesh.reduce((size, axis) => size * Number(axis.size), 1);
    return Math.max(1, programs.reduce((size, program) => size + program.ranks.length, 0));
  }

  // Ranks whose coordinates are among those listed for each axis; the first axis varies slowest.
  ranksAt(valuesOf) {
    return this.message.mesh.reduce(
      (ranks, axis) => ranks.flatMap((rank) => valuesOf(axis).map((value) => rank * Number(axis.size) + value)),
      [0],
    );
  }

  ranksOf(program) {
    if (program.ranks.length > 0) return program.ranks.map(Number);
    const fixed = new Map(program.coordinates.map(({ axis, value }) => [axis, Number(value)]));
    return this.ranksAt((axis) => (fixed.has(axis.name) ? [fixed.get(axis.name)] : range(0, Number(axis.size))));
  }

  // The axes along which the ranks of a group differ.
  axesOf(group) {
    return group.along ? [group.along] : group.axes;
  }

  // Of the ranks along a group's axes, its members: all, or those at its positions.
  membersAmong(group, ranks) {
    return group.along ? group.positions.map((position) => ranks[Number(position)]) : ranks;
  }

  // Every set of ranks that a group stands for: one for each coordinate along the axes that it does not name.
  membersOf(group) {
    if (group.ranks.length > 0) return [group.ranks.map(Number)];
    const axes = this.axesOf(group);
    const first = this.ranksAt((axis) => (axes.includes(axis.name) ? [0] : range(0, Number(axis.size))));
    const steps = this.ranksAt((axis) => (axes.includes(axis.name) ? range(0, Number(axis.size)) : [0]));
    const kept = this.membersAmong(group, steps);
    return first.map((rank) => kept.map((step) => rank + step));
  }
}

export function range(begin, end) {
  return Array.from({ length: end - begin }, (_, at) => begin + at);
}
