// Memory: bytes of the arena in use on every rank, and the chosen rank's arena, buffer by buffer.

import { Canvas, follow } from "./canvas.js";
import { inkOn, roleColour, theme } from "./colours.js";
import { light } from "./course.js";
import { AXIS, GUTTER, chooseRank, drawCursor, drawTicks, overTime, scale } from "./plot.js";
import { change, lit, on, shown, watched } from "./state.js";
import { describeBuffer, hush, tell } from "./tip.js";
import { bytes, time } from "./words.js";

const USE = 92;
const GAP = 14;
const MAP = 176;

export class Memory {
  constructor(scene) {
    this.scene = scene;
    this.canvas = new Canvas("Memory over time", USE + GAP + MAP + AXIS, (c) => this.draw(c), (c) => this.drawOver(c));
    this.host = this.canvas.host;
    this.used = new Map();
    this.rank = 0;
    follow(this.canvas, {
      point: (x, y, event) => this.point(x, y, event),
      leave: () => {
        hush();
        change("light", { pointed: null, cursor: null });
      },
      press: (x, y) => {
        const b = this.find(x, y);
        change("light", { pinned: b < 0 ? null : light(shown(scene), { kind: "buffer", at: b }), pointed: null });
      },
    });
    overTime(this.canvas, { up: () => chooseRank(-1), down: () => chooseRank(1) });
    on("program paint range rank", () => this.canvas.repaint());
    on("light", () => (watched(scene) === this.rank ? this.canvas.repaintOver() : this.canvas.repaint()));
  }

  /** Steps of every rank's use, {time: ticks, bytes}, and the most that any rank uses and reaches. */
  steps(course) {
    if (this.used.has(course)) return this.used.get(course);
    const { held } = course;
    const arena = this.scene.words.spaces.indexOf("arena");
    let most = 0, top = 0;
    const ranks = Array.from({ length: this.scene.numRanks }, (_, rank) => {
      const events = [];
      for (let b = held.offsets[rank]; b < held.offsets[rank + 1]; b++) {
        if (held.space[b] !== arena || held.begin[b] < 0) continue;
        events.push([course.start[held.begin[b]], held.bytes[b]], [course.end[held.end[b]], -held.bytes[b]]);
        top = Math.max(top, held.at[b] + held.bytes[b]);
      }
      // What is given back counts before what is taken at the same time.
      events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
      const out = { time: new Float64Array(events.length), bytes: new Float64Array(events.length) };
      let now = 0;
      events.forEach(([at, size], e) => {
        out.time[e] = at;
        out.bytes[e] = now += size;
        most = Math.max(most, now);
      });
      return out;
    });
    const found = { ranks, most: Math.max(most, 1), top: Math.max(top, 1) };
    this.used.set(course, found);
    return found;
  }

  draw(context) {
    const course = shown(this.scene);
    this.rank = watched(this.scene);
    const width = this.canvas.width - GUTTER;
    context.fillStyle = theme.plot;
    context.fillRect(GUTTER, 0, width, USE);
    context.fillRect(GUTTER, USE + GAP, width, MAP);
    drawTicks(context, this.canvas, 0, USE + GAP + MAP);
    if (!course) return;
    const { ranks, most, top } = this.steps(course);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width, this.canvas.height - AXIS);
    context.clip();
    this.drawUse(context, course, ranks, most);
    this.drawMap(context, course, top);
    context.restore();
    context.fillStyle = theme.muted;
    context.textAlign = "right";
    context.textBaseline = "top";
    this.drawSize(context, most, 1);
    this.drawSize(context, top, USE + GAP + 1);
    context.textBaseline = "bottom";
    context.fillText("0", GUTTER - 6, USE);
    context.fillText(`r${this.rank}`, GUTTER - 6, USE + GAP + MAP);
  }

  /** A size in the gutter, its number above its unit. */
  drawSize(context, size, y) {
    const [number, unit] = bytes(size).split(" ");
    context.fillText(number, GUTTER - 6, y);
    context.fillText(unit, GUTTER - 6, y + 12);
  }

  /** Most bytes that a rank has in use in every pixel column. */
  columns(course, steps) {
    const { x } = scale(this.canvas);
    const out = new Float64Array(Math.ceil(this.canvas.width));
    let column = 0, now = 0;
    for (let e = 0; e < steps.time.length; e++) {
      const at = Math.min(Math.max(Math.floor(x(steps.time[e] * course.tick)), 0), out.length);
      for (; column < at; column++) out[column] = Math.max(out[column], now);
      now = steps.bytes[e];
      if (column < out.length) out[column] = Math.max(out[column], now);
    }
    for (; column < out.length; column++) out[column] = Math.max(out[column], now);
    return out;
  }

  drawUse(context, course, ranks, most) {
    const y = (size) => USE - (size / most) * (USE - 6);
    const all = ranks.map((steps) => this.columns(course, steps));
    const [low, high] = [all[0].slice(), all[0].slice()];
    for (const line of all) {
      for (let x = 0; x < line.length; x++) {
        if (line[x] < low[x]) low[x] = line[x];
        if (line[x] > high[x]) high[x] = line[x];
      }
    }
    const band = new Path2D();
    for (let x = GUTTER; x < high.length; x++) band.rect(x, y(high[x]), 1, Math.max(y(low[x]) - y(high[x]), 1));
    context.fillStyle = theme.accent;
    context.globalAlpha = 0.22;
    context.fill(band);
    context.globalAlpha = 1;
    const own = new Path2D();
    for (let x = GUTTER; x < high.length; x++) {
      own.lineTo(x, y(all[this.rank][x]));
      own.lineTo(x + 1, y(all[this.rank][x]));
    }
    context.strokeStyle = theme.accent;
    context.lineWidth = 1.5;
    context.stroke(own);
  }

  /** Place of a buffer in the arena's map: [x, y, width, height]. */
  place(course, b) {
    const { held } = course;
    const { x } = scale(this.canvas);
    const { top } = this.steps(course);
    const [from, to] = [x(course.start[held.begin[b]] * course.tick), x(course.end[held.end[b]] * course.tick)];
    const height = (held.bytes[b] / top) * (MAP - 4);
    const y = USE + GAP + MAP - (held.at[b] / top) * (MAP - 4) - height;
    return [from, y, Math.max(to - from, 1), Math.max(height, 1)];
  }

  /** Buffers of the chosen rank that lie in the arena and are used. */
  buffers(course) {
    const { held } = course;
    const out = [];
    for (let b = held.offsets[this.rank]; b < held.offsets[this.rank + 1]; b++) if (held.at[b] >= 0 && held.begin[b] >= 0) out.push(b);
    return out;
  }

  drawMap(context, course) {
    const { held } = course;
    context.textAlign = "left";
    context.textBaseline = "middle";
    for (const b of this.buffers(course)) {
      const [x, y, width, height] = this.place(course, b);
      if (x > this.canvas.width || x + width < GUTTER) continue;
      const colour = roleColour(held.role[b]);
      context.fillStyle = colour;
      context.fillRect(x, y, width > 3 ? width - 0.7 : width, height > 3 ? height - 0.7 : height);
      const name = `b${b - held.offsets[this.rank]} ${held.role[b] < 0 ? "scratch" : this.scene.words.roles[held.role[b]]}`;
      if (width < name.length * 6.4 + 8 || height < 12) continue;
      context.fillStyle = inkOn(colour);
      context.fillText(name, Math.max(x, GUTTER) + 5, y + height / 2);
    }
  }

  drawOver(context) {
    drawCursor(context, this.canvas, this.canvas.height - AXIS);
    const course = shown(this.scene);
    if (!course || lit()?.course !== course) return;
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.canvas.width, this.canvas.height - AXIS);
    context.clip();
    context.strokeStyle = theme.lit;
    context.lineWidth = 2;
    const { held } = course;
    for (const b of lit().buffers) {
      const own = b >= held.offsets[this.rank] && b < held.offsets[this.rank + 1];
      if (own && held.at[b] >= 0 && held.begin[b] >= 0) context.strokeRect(...this.place(course, b));
    }
    context.restore();
  }

  find(x, y) {
    const course = shown(this.scene);
    if (!course || x < GUTTER || y < USE + GAP) return -1;
    return this.buffers(course).find((b) => {
      const [left, top, width, height] = this.place(course, b);
      return x >= left && x <= left + width && y >= top && y <= top + height;
    }) ?? -1;
  }

  point(x, y, event) {
    const course = shown(this.scene);
    const b = this.find(x, y);
    const cursor = x >= GUTTER ? scale(this.canvas).seconds(x) : null;
    change("light", { pointed: b < 0 ? null : light(course, { kind: "buffer", at: b }), cursor });
    if (b >= 0) tell(event, describeBuffer(course, b));
    else if (course && cursor !== null && y < USE) {
      const steps = this.steps(course).ranks[this.rank];
      let e = 0;
      while (e < steps.time.length && steps.time[e] * course.tick <= cursor) e++;
      tell(event, [`rank ${this.rank} at ${time(cursor)}`, `${bytes(e ? steps.bytes[e - 1] : 0)} of the arena in use`]);
    } else hush();
  }
}
