// Course: one program on its clock, with what the panels look up in it; and what lights up with what.

import { above, grouped } from "./columns.js";

const MAX_LIT = 4000;

/** Columns whose names begin with `prefix`, by the rest of their names. */
function under(columns, prefix) {
  const out = {};
  for (const [name, values] of Object.entries(columns)) if (name.startsWith(prefix)) out[name.slice(prefix.length)] = values;
  return out;
}

/** Make a scene of its JSON value and its unpacked columns. */
export function openScene(value, columns, words, index) {
  const made = new Map();
  const scene = { ...value, columns, words, index, numRanks: value.nodes.length };
  scene.slices = value.masks.map((_, mask) => under(columns, `${mask}.slice.`));
  scene.blocks = value.masks.map((_, mask) => under(columns, `${mask}.block.`));
  scene.course = (mask, direction) => {
    const key = `${mask}.${direction}`;
    if (!made.has(key)) {
      const told = value.masks[mask]?.directions[direction];
      made.set(key, told ? new Course(scene, told, `${key}.`, mask) : null);
    }
    return made.get(key);
  };
  return scene;
}

class Course {
  constructor(scene, told, prefix, mask) {
    Object.assign(this, under(scene.columns, prefix));
    this.scene = scene;
    this.mask = mask;
    this.slice = scene.slices[mask];
    this.block = scene.blocks[mask];
    this.buf = [0, 1, 2, 3, 4].map((k) => this[`buf${k}`]);
    this.held = under(scene.columns, `${prefix}held.`);
    this.link = under(scene.columns, `${prefix}link.`);
    this.tick = told.tick_s;
    this.makespan = told.makespan_s;
    this.spent = told.spent_s;
    this.numStages = told.stages;
    this.is = Object.fromEntries(scene.words.ops.map((name, op) => [name, op]));
    this.across = this.crossings();
    this.lanes = this.offsets.length > 1 ? Array.from({ length: scene.numRanks }, (_, r) => this.lanesOf(r)) : [];
  }

  rankOf(i) {
    return above(this.offsets, i) - 1;
  }

  attends(i) {
    return this.op[i] === this.is.attend || this.op[i] === this.is.attend_grad;
  }

  transfers(i) {
    return this.op[i] === this.is.send || this.op[i] === this.is.recv;
  }

  /** 1 for every transfer that leaves its node. */
  crossings() {
    const { nodes } = this.scene;
    const out = new Uint8Array(this.op.length);
    for (let rank = 0; rank + 1 < this.offsets.length; rank++) {
      for (let i = this.offsets[rank]; i < this.offsets[rank + 1]; i++) {
        out[i] = this.peer[i] >= 0 && nodes[this.peer[i]] !== nodes[rank] ? 1 : 0;
      }
    }
    return out;
  }

  /** Whether a transfer leaves its node. */
  crosses(i) {
    return this.across[i] === 1;
  }

  /** Seconds [from, to] of the box that stands for an instruction. */
  extent(i) {
    const moved = this.transfers(i) && this.comm_start[i] >= 0;
    return [(moved ? this.comm_start : this.start)[i] * this.tick, (moved ? this.comm_end : this.end)[i] * this.tick];
  }

  /** Boxes of a rank by lane: work on the compute stream, messages sent, messages received. */
  lanesOf(rank) {
    const work = [], out = [], into = [];
    for (let i = this.offsets[rank]; i < this.offsets[rank + 1]; i++) {
      if (this.end[i] > this.start[i] && !this.transfers(i)) work.push(i);
      if (this.comm_start[i] < 0) continue;
      if (this.op[i] !== this.is.recv && this.op[i] !== this.is.launch) out.push(i);
      if (this.op[i] === this.is.recv) into.push(i);
    }
    return [lane(work, this.start, this.end), lane(out, this.comm_start, this.comm_end), lane(into, this.comm_start, this.comm_end)];
  }

  /** Slices that an instruction attends. */
  slicesOf(i) {
    return this.slices0[i] < 0 ? [] : this.index.subarray(this.slices0[i], this.slices1[i]);
  }

  /** Instructions that attend each slice. */
  get attenders() {
    if (!this.attendersMade) {
      const owners = [], items = [];
      for (let i = 0; i < this.op.length; i++) {
        for (const s of this.slicesOf(i)) {
          owners.push(s);
          items.push(i);
        }
      }
      this.attendersMade = grouped(this.slice.q0.length, owners, items);
    }
    return this.attendersMade;
  }

  /** Instructions that touch each buffer. */
  get touchers() {
    if (!this.touchersMade) {
      const owners = [], items = [];
      for (let i = 0; i < this.op.length; i++) {
        for (const column of this.buf) {
          if (column[i] >= 0) {
            owners.push(column[i]);
            items.push(i);
          }
        }
      }
      this.touchersMade = grouped(this.held.role.length, owners, items);
    }
    return this.touchersMade;
  }

  /** Slices of each block. */
  get pieces() {
    this.piecesMade ??= grouped(this.block.q.length, this.slice.block);
    return this.piecesMade;
  }

  /** Blocks that an instruction computes. */
  blocksOf(i) {
    return [...new Set(Array.from(this.slicesOf(i), (s) => this.slice.block[s]))];
  }

  /** All sends and receives that a rank joins to a round. */
  joined(rank, round) {
    const out = [];
    for (let i = this.offsets[rank]; i < this.offsets[rank + 1]; i++) {
      if (this.round[i] === round && (this.transfers(i) || this.op[i] === this.is.all_to_all)) out.push(i);
    }
    return out;
  }
}

/** Boxes in order of their starts. reach: the latest end so far, so that the first visible one is found by halving. */
function lane(items, start, end) {
  items.sort((a, b) => start[a] - start[b]);
  const reach = new Float64Array(items.length);
  let latest = 0;
  for (let k = 0; k < items.length; k++) reach[k] = latest = Math.max(latest, end[items[k]]);
  return { items: Int32Array.from(items), start, end, reach };
}

/**
 * What lights up in all panels with one thing pointed at: {course, main, instructions, slices, buffers, links}.
 *
 * main: the thing itself, as {kind, ...}. Instructions and buffers are numbers, links [src, dst] pairs.
 */
export function light(course, main) {
  const out = { course, main, instructions: [], slices: [], buffers: [], links: [] };
  if (main.kind === "instruction") lightInstruction(out, course, main.at);
  else if (main.kind === "block") {
    out.slices = [...course.pieces.of(main.at)];
    out.instructions = [...new Set(out.slices.flatMap((s) => [...course.attenders.of(s)]))];
  } else if (main.kind === "buffer") {
    out.buffers = [main.at];
    out.instructions = [...course.touchers.of(main.at)];
  } else if (main.kind === "link") {
    out.links = [[main.src, main.dst]];
    for (let i = course.offsets[main.src]; i < course.offsets[main.src + 1]; i++) {
      if (course.op[i] === course.is.send && course.peer[i] === main.dst) out.instructions.push(i, course.partner[i]);
    }
  }
  out.instructions = out.instructions.filter((i) => i >= 0).slice(0, MAX_LIT);
  return out;
}

function lightInstruction(out, course, i) {
  const rank = course.rankOf(i), op = course.op[i];
  out.instructions = [i];
  out.slices = [...course.slicesOf(i)];
  out.buffers = course.buf.map((column) => column[i]).filter((b) => b >= 0);
  if (op === course.is.launch || op === course.is.wait) out.instructions.push(...course.joined(rank, course.round[i]));
  for (const each of [...out.instructions]) {
    if (!course.transfers(each)) continue;
    const met = course.partner[each];
    if (met >= 0) out.instructions.push(met);
    out.links.push(course.op[each] === course.is.send ? [rank, course.peer[each]] : [course.peer[each], rank]);
    // What is on its way lights where it is attended too: the rows' own block of the matrix is the peer's business.
    if (met >= 0) out.buffers.push(...course.buf.map((column) => column[met]).filter((b) => b >= 0));
  }
}
