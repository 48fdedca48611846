// Matrix: queries down, keys across; every visible pair in the colour of who computes it, or when.

import { Canvas, drawSides, follow, navigate } from "./canvas.js";
import { above } from "./columns.js";
import { inkOn, pixel, rankColour, rgb, stageColour, theme } from "./colours.js";
import { light } from "./course.js";
import { change, lit, on, shown, state } from "./state.js";
import { describeBlock, hush, tell } from "./tip.js";

const MARGIN = 30;
const STRIP = 6;
const LABELLED = { wide: 20, high: 11 };

export class Matrix {
  constructor(scene) {
    this.scene = scene;
    this.order = [...scene.columns["shard.spans"].filter((_, i) => i % 2 === 0)].sort((a, b) => a - b);
    this.canvas = new Canvas("Attention matrix", (width) => Math.min(width, 560), (c) => this.draw(c), (c) => this.drawOver(c));
    this.host = this.canvas.host;
    this.homes = this.bands();
    follow(this.canvas, {
      point: (x, y, event) => this.point(x, y, event),
      leave: () => {
        hush();
        change("light", { pointed: null });
      },
      press: (x, y) => this.pin(this.find(x, y)),
    });
    navigate(this.canvas, { pan: (dx, dy) => this.pan(dx, dy), zoom: (factor, x, y) => this.zoom(factor, x, y) });
    this.host.addEventListener("keydown", (event) => this.key(event));
    on("program paint sight", () => this.canvas.repaint());
    on("light", () => this.canvas.repaintOver());
  }

  /** Runs of tokens by home rank, [from, to, rank], in the order of positions. */
  bands() {
    const { columns } = this.scene;
    const out = [];
    for (let shard = 0; shard + 1 < columns["shard.offsets"].length; shard++) {
      for (let s = columns["shard.offsets"][shard]; s < columns["shard.offsets"][shard + 1]; s++) {
        out.push([columns["shard.spans"][2 * s], columns["shard.spans"][2 * s + 1], columns["shard.home"][shard]]);
      }
    }
    return out.sort((a, b) => a[0] - b[0]);
  }

  get side() {
    return Math.min(this.canvas.width, this.canvas.height) - MARGIN - 1;
  }

  /** Pixels per token, and positions of a query and a key. */
  get scale() {
    const [q0, k0, size] = state.sight;
    const per = this.side / size;
    return { per, x: (k) => MARGIN + (k - k0) * per, y: (q) => MARGIN + (q - q0) * per };
  }

  pan(dx, dy) {
    const [q, k, size] = state.sight;
    this.look(q - dy / this.scale.per, k - dx / this.scale.per, size);
  }

  zoom(factor, x, y) {
    const [q, k, size] = state.sight;
    const { per } = this.scale;
    const wanted = Math.min(Math.max(size / factor, 8), this.scene.tokens);
    const [atQ, atK] = [(y - MARGIN) / per, (x - MARGIN) / per];
    this.look(q + atQ - (atQ * wanted) / size, k + atK - (atK * wanted) / size, wanted);
  }

  look(q, k, size) {
    const inside = (at) => Math.min(Math.max(at, 0), this.scene.tokens - size);
    change("sight", { sight: [inside(q), inside(k), size] });
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const middle = MARGIN + this.side / 2;
    const zooms = { "+": 1.5, "=": 1.5, "-": 1 / 1.5 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (steps[event.key]) this.step(...steps[event.key]);
    else if (zooms[event.key]) this.zoom(zooms[event.key], middle, middle);
    else if (event.key === "0") this.look(0, 0, this.scene.tokens);
    else return;
    event.preventDefault();
  }

  /** Keep something lit, and choose the rank that computes it. */
  pin(found) {
    if (found?.instructions.length) change("rank", { rank: found.course.rankOf(found.instructions[0]) });
    change("light", { pinned: found, pointed: null });
  }

  /** Pin the next block from the one that is lit, along a row or a column. */
  step(down, right) {
    const course = shown(this.scene);
    if (!course) return;
    const { block } = course;
    const now = lit()?.course === course && lit().main.kind === "block" ? lit().main.at : -1;
    const [q, kv] = now < 0 ? [-1, -1] : [block.q[now], block.kv[now]];
    let best = now < 0 && block.q.length ? 0 : -1;
    for (let b = 0; b < block.q.length && now >= 0; b++) {
      const ahead = down ? (block.q[b] - q) * down : (block.kv[b] - kv) * right;
      const level = down ? block.kv[b] === kv : block.q[b] === q;
      if (!level || ahead <= 0) continue;
      const further = best < 0 ? Infinity : down ? (block.q[best] - q) * down : (block.kv[best] - kv) * right;
      if (ahead < further) best = b;
    }
    if (best >= 0) this.pin(light(course, { kind: "block", at: best }));
  }

  draw(context) {
    const course = shown(this.scene);
    const { side, canvas } = this;
    context.fillStyle = theme.plot;
    context.fillRect(MARGIN, MARGIN, side, side);
    if (course) this.raster(context, course);
    this.drawBorders(context);
    this.drawStrips(context);
    if (course) this.drawNames(context, course);
    context.strokeStyle = theme.line;
    context.lineWidth = 1;
    context.strokeRect(MARGIN - 0.5, MARGIN - 0.5, side + 1, side + 1);
    context.fillStyle = theme.muted;
    context.textBaseline = "alphabetic";
    drawSides(context, MARGIN, 11, "keys →", "← queries");
    canvas.host.dataset.sight = state.sight.join(" ");
  }

  /** Fill pixels row by row; each visible slice gets one at least. What is under each pixel is kept for the pointer. */
  raster(context, course) {
    const { ratio } = this.canvas;
    const size = Math.round(this.side * ratio);
    const image = context.createImageData(size, size);
    const pixels = new Uint32Array(image.data.buffer);
    const under = new Int32Array(size * size).fill(-1);
    const colours = this.colours(course);
    const { q0, q1, k0, k1, lo, hi } = course.slice;
    const [fromQ, fromK, tokens] = state.sight;
    const per = size / tokens;
    const [toQ, toK] = [fromQ + tokens, fromK + tokens];
    for (let s = 0; s < q0.length; s++) {
      if (q1[s] <= fromQ || q0[s] >= toQ || k1[s] <= fromK || k0[s] >= toK) continue;
      const top = Math.max(Math.floor((q0[s] - fromQ) * per + 0.5), 0);
      const bottom = Math.min(Math.max(Math.floor((q1[s] - fromQ) * per + 0.5), top + 1), size);
      const colour = colours[s];
      for (let row = top; row < bottom; row++) {
        const q = Math.min(Math.max(fromQ + (row + 0.5) / per, q0[s]), q1[s] - 1);
        const left = Math.max(Math.floor((Math.max(k0[s], q + lo[s]) - fromK) * per + 0.5), 0);
        const right = Math.max(Math.floor((Math.min(k1[s], q + hi[s] + 1) - fromK) * per + 0.5), left + 1);
        pixels.fill(colour, row * size + left, row * size + Math.min(right, size));
        under.fill(s, row * size + left, row * size + Math.min(right, size));
      }
    }
    this.under = { course, size, slices: under };
    context.putImageData(image, Math.round(MARGIN * ratio), Math.round(MARGIN * ratio));
  }

  /** Pixel colour of each slice: of its first attender. */
  colours(course) {
    const { offsets, items } = course.attenders;
    const out = new Uint32Array(course.slice.q0.length).fill(pixel("#999999"));
    const made = new Map();
    for (let s = 0; s < out.length; s++) {
      if (offsets[s] === offsets[s + 1]) continue;
      const i = items[offsets[s]];
      const key = state.colour === "rank" ? course.rankOf(i) : course.stage[i];
      if (!made.has(key)) made.set(key, pixel(this.colour(course, i)));
      out[s] = made.get(key);
    }
    return out;
  }

  colour(course, i) {
    return state.colour === "rank" ? rankColour(this.scene.nodes, course.rankOf(i)) : stageColour(course.stage[i], course.numStages);
  }

  /** Borders of shards as hairlines and of documents as lines, where they are far enough apart to be told. */
  drawBorders(context) {
    const { x, y, per } = this.scale;
    const { side } = this;
    context.save();
    context.beginPath();
    context.rect(MARGIN, MARGIN, side, side);
    context.clip();
    for (const [borders, colour, apart] of [[this.order, theme.faint, 5], [this.scene.columns.borders, theme.line, 3]]) {
      context.strokeStyle = colour;
      context.lineWidth = 1;
      context.beginPath();
      let last = -Infinity;
      for (const at of borders) {
        if ((at - last) * per < apart) continue;
        last = at;
        const [across, down] = [Math.round(x(at)) + 0.5, Math.round(y(at)) + 0.5];
        context.moveTo(across, MARGIN);
        context.lineTo(across, MARGIN + side);
        context.moveTo(MARGIN, down);
        context.lineTo(MARGIN + side, down);
      }
      context.stroke();
    }
    context.restore();
  }

  /** Along both sides: documents, light and dark in turn, and the home ranks of all tokens. */
  drawStrips(context) {
    const { x, y } = this.scale;
    const { borders } = this.scene.columns;
    const end = MARGIN + this.side;
    const strip = (from, to, place, colour, along) => {
      const a = Math.min(Math.max(along(from), MARGIN), end), b = Math.min(Math.max(along(to), MARGIN), end);
      if (b <= a) return;
      context.fillStyle = colour;
      if (along === x) context.fillRect(a, place, b - a, STRIP);
      else context.fillRect(place, a, STRIP, b - a);
    };
    for (const along of [x, y]) {
      for (let d = 0; d + 1 < borders.length; d++) {
        strip(borders[d], borders[d + 1], MARGIN - 2 * STRIP - 3, d % 2 ? theme.line : theme.muted, along);
      }
      for (const [from, to, rank] of this.homes) strip(from, to, MARGIN - STRIP - 1, rankColour(this.scene.nodes, rank * this.scene.intra), along);
    }
  }

  /** Pattern names in blocks that are large enough. */
  drawNames(context, course) {
    const { x, y, per } = this.scale;
    const { words } = this.scene;
    const { q0, q1, k0, k1 } = course.slice;
    context.textAlign = "center";
    context.textBaseline = "middle";
    if (course.block.q.length > 2000) return;
    for (let b = 0; b < course.block.q.length; b++) {
      const pieces = course.pieces.of(b);
      const s = pieces.reduce((a, c) => ((q1[c] - q0[c]) * (k1[c] - k0[c]) > (q1[a] - q0[a]) * (k1[a] - k0[a]) ? c : a));
      if ((q1[s] - q0[s]) * per < LABELLED.high || (k1[s] - k0[s]) * per < LABELLED.wide) continue;
      const who = course.attenders.of(s);
      if (!who.length) continue;
      const shape = course.block.shape[b];
      const name = words.shapes[shape];
      // The diagonal's name stands in the visible half of its largest triangle.
      const causal = course.slice.hi[s] < k1[s] - 1 - q0[s];
      if (causal && (k1[s] - k0[s]) * per < 2 * LABELLED.wide) continue;
      const part = causal ? 0.32 : 0.5;
      const [atX, atY] = [x(k0[s] + part * (k1[s] - k0[s])), y(q0[s] + (1 - part) * (q1[s] - q0[s]))];
      if (atX < MARGIN || atY < MARGIN || name.length * 6 > (k1[s] - k0[s]) * per) continue;
      context.fillStyle = inkOn(this.colour(course, who[0]));
      context.fillText(name, atX, atY);
    }
  }

  drawOver(context) {
    const shownNow = lit();
    if (shownNow?.course !== shown(this.scene) || !shownNow?.slices.length) return;
    const { side } = this;
    context.save();
    context.beginPath();
    context.rect(MARGIN, MARGIN, side, side);
    context.clip();
    const [r, g, b] = rgb(theme.plot);
    const shape = new Path2D();
    for (const s of shownNow.slices) this.outline(shape, shownNow.course.slice, s);
    // All but what is lit steps back: a veil over everything, with holes.
    const veil = new Path2D();
    veil.rect(MARGIN, MARGIN, side, side);
    veil.addPath(shape);
    context.fillStyle = `rgba(${r},${g},${b},0.62)`;
    context.fill(veil, "evenodd");
    context.strokeStyle = theme.lit;
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.stroke(shape);
    context.restore();
  }

  /** A slice as a polygon: its rectangle between two diagonals. */
  outline(path, slice, s) {
    const { x, y } = this.scale;
    const [q0, q1, k0, k1] = [slice.q0[s], slice.q1[s], slice.k0[s], slice.k1[s]];
    const clamp = (k) => Math.min(Math.max(k, k0), k1);
    const low = (q) => clamp(q + slice.lo[s]), high = (q) => clamp(q + slice.hi[s] + 1);
    const turns = [q0, k0 - slice.lo[s], k1 - slice.lo[s], k0 - slice.hi[s] - 1, k1 - slice.hi[s] - 1, q1];
    const rows = turns.filter((q) => q >= q0 && q <= q1).sort((a, b) => a - b);
    const points = [...rows.map((q) => [high(q), q]), ...rows.reverse().map((q) => [low(q), q])];
    points.forEach(([k, q], i) => (i ? path.lineTo(x(k), y(q)) : path.moveTo(x(k), y(q))));
    path.closePath();
  }

  /** What lies under a point of the canvas, lit; null for nothing. */
  find(x, y) {
    const course = shown(this.scene);
    const { under } = this;
    if (!course || under?.course !== course) return null;
    const at = (place) => Math.floor(((place - MARGIN) / this.side) * under.size);
    const [column, row] = [at(x), at(y)];
    if (column < 0 || row < 0 || column >= under.size || row >= under.size) return null;
    const s = under.slices[row * under.size + column];
    return s < 0 ? null : light(course, { kind: "block", at: course.slice.block[s] });
  }

  point(x, y, event) {
    const found = this.find(x, y);
    if (found?.main.at !== state.pointed?.main.at || !found !== !state.pointed) change("light", { pointed: found });
    const { per } = this.scale;
    const [q, k] = [state.sight[0] + (y - MARGIN) / per, state.sight[1] + (x - MARGIN) / per].map(Math.floor);
    if (found) tell(event, describeBlock(found.course, found.main.at, q, k));
    else if (q >= 0 && k >= 0 && x > MARGIN && y > MARGIN) tell(event, [`query ${q}, key ${k}`, `documents ${this.document(q)} and ${this.document(k)}: nothing to see`]);
    else hush();
  }

  document(position) {
    return above(this.scene.columns.borders, position) - 1;
  }
}
