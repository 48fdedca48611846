// Timeline: a row per rank, its compute stream above its messages out and in; arrows between the rows.

import { drawArrows, firstReaching, MOST, underWay } from "./arrows.js";
import { both, Boxes } from "./boxes.js";
import { Canvas, follow } from "./canvas.js";
import { inkOn, rankColour, stageColour, theme } from "./colours.js";
import { light } from "./course.js";
import { AXIS, GUTTER, chooseRank, drawCursor, drawTicks, overTime, scale } from "./plot.js";
import { change, lit, on, shown, state } from "./state.js";
import { describe, hush, tell } from "./tip.js";

const ROW = { least: 10, most: 46, all: 440 };
const MOST_HEIGHT = 660;
const NEAR = 3;
const HEAD = 4;

export class Timeline {
  constructor(scene) {
    this.scene = scene;
    this.top = 0;
    this.boxes = new Boxes();
    this.row = Math.min(Math.max(Math.floor(ROW.all / scene.numRanks), ROW.least), ROW.most);
    const height = HEAD + Math.min(this.row * scene.numRanks, MOST_HEIGHT) + AXIS;
    this.canvas = new Canvas("Timeline", height, (c) => this.draw(c), (c) => this.drawOver(c));
    this.host = this.canvas.host;
    follow(this.canvas, {
      point: (x, y, event) => this.point(x, y, event),
      leave: () => {
        hush();
        change("light", { pointed: null, cursor: null });
      },
      press: (x, y) => this.press(x, y),
    });
    overTime(this.canvas, { scroll: (dy) => this.scroll(dy), up: () => chooseRank(-1), down: () => chooseRank(1) });
    on("program paint range rank", () => this.canvas.repaint());
    on("light", () => this.canvas.repaintOver());
  }

  scroll(dy) {
    const most = HEAD + this.row * this.scene.numRanks - (this.canvas.height - AXIS);
    this.top = Math.min(Math.max(this.top + dy, 0), Math.max(most, 0));
  }

  /** Top and height of a rank's lanes: work, out, in. */
  lane(rank, which) {
    const gap = Math.max(1, Math.round(this.row * 0.12));
    const thin = Math.max(2, Math.round((this.row - gap) * 0.16));
    const work = this.row - gap - 2 * thin;
    const y = HEAD + rank * this.row - this.top;
    return [[y, work], [y + work, thin], [y + work + thin, thin]][which];
  }

  draw(context) {
    const course = shown(this.scene);
    const bottom = this.canvas.height - AXIS;
    this.host.dataset.range = state.range.join(" ");
    this.ground(context, bottom);
    drawTicks(context, this.canvas, 0, bottom);
    if (!course) return;
    const began = performance.now();
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.canvas.width - GUTTER, bottom);
    context.clip();
    const [first, last] = this.ranks();
    this.palette = this.readPalette(course);
    this.boxes.clear(this.canvas.width - GUTTER, bottom, this.canvas.ratio);
    const labels = [];
    for (let rank = first; rank <= last; rank++) {
      for (const which of [0, 1, 2]) this.drawLane(course, rank, which, labels);
    }
    this.boxes.put(context, GUTTER, 0);
    this.drawLabels(context, course, labels);
    const { x } = scale(this.canvas);
    const sends = state.arrows ? this.arrows(course) : [];
    drawArrows(context, course, sends, (tick, rank, into) => this.place(x(tick * course.tick), rank, into), false);
    context.restore();
    this.host.dataset.drawn = (performance.now() - began).toFixed(2);
  }

  /** First and last rank in sight. */
  ranks() {
    const bottom = this.canvas.height - AXIS;
    const last = Math.floor((this.top + bottom - HEAD - 1) / this.row);
    return [Math.max(Math.floor((this.top - HEAD) / this.row), 0), Math.min(last, this.scene.numRanks - 1)];
  }

  /** Sends to draw: all in sight; where those are too many, the chosen rank's, if these are few enough. */
  arrows(course) {
    const [from, to] = state.range.map((seconds) => seconds / course.tick);
    return underWay(course, from, to, MOST.all) ?? underWay(course, from, to, MOST.ofRank, state.rank) ?? [];
  }

  place(x, rank, into) {
    const [y, height] = this.lane(rank, into ? 2 : 1);
    return [x, y + height / 2];
  }

  ground(context, bottom) {
    const { nodes } = this.scene;
    const [first, last] = this.ranks();
    context.fillStyle = theme.plot;
    context.fillRect(GUTTER, 0, this.canvas.width - GUTTER, bottom);
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(12 / this.row);
    for (let rank = first; rank <= last; rank++) {
      const [y, work] = this.lane(rank, 0);
      const chosen = rank === state.rank;
      if (chosen) {
        context.fillStyle = theme.accent;
        context.globalAlpha = 0.13;
        context.fillRect(0, y, this.canvas.width, this.row - 1);
        context.globalAlpha = 1;
      }
      if (rank % every === 0 || chosen) {
        context.fillStyle = chosen ? theme.ink : theme.muted;
        context.fillText(`r${rank}`, GUTTER - 8, y + Math.max(work, this.row - 2) / 2 + 0.5);
      }
      if (rank > first && nodes[rank] !== nodes[rank - 1]) {
        context.fillStyle = theme.line;
        context.fillRect(0, y - 1, this.canvas.width, 1);
      }
    }
  }

  /** Boxes of one lane; those that begin in a column that is already filled are left out, equal neighbours are joined. */
  drawLane(course, rank, which, labels) {
    const { items, start, end, reach } = course.lanes[rank][which];
    const [y, height] = this.lane(rank, which);
    const { boxes } = this;
    const [from, to] = state.range.map((seconds) => seconds / course.tick);
    const per = boxes.columns / (to - from);
    const colours = this.colours(course, rank, which);
    let left = 0, right = -1, colour = null;
    for (let k = firstReaching(reach, from); k < items.length; k++) {
      const i = items[k];
      if (start[i] > to) break;
      const x0 = Math.floor((start[i] - from) * per), x1 = Math.floor((end[i] - from) * per);
      const next = colours(i);
      if (x1 - x0 >= 2) {
        if (right > left) boxes.fill(left, right, y, height, colour.pixel);
        right = -1;
        if (next === null) boxes.fill(x0, x1, y + height / 2 - 1, 2, this.palette.wait.pixel);
        else boxes.fill(x0, x1 - x0 > 5 ? x1 - 1 : x1, y, height, next.pixel);
        if (next && !which && height >= 13 && x1 - x0 > 26 * boxes.ratio) labels.push([i, x0, x1, y + height / 2, next.css]);
        continue;
      }
      if (x0 < right || next === null) continue;
      if (x0 > right || next !== colour) {
        if (right > left) boxes.fill(left, right, y, height, colour.pixel);
        [left, colour] = [x0, next];
      }
      right = x0 + 1;
    }
    if (right > left) boxes.fill(left, right, y, height, colour.pixel);
  }

  drawLabels(context, course, labels) {
    const { ratio } = this.boxes;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const [i, x0, x1, y, colour] of labels) {
      const label = this.label(course, i);
      const [left, right] = [Math.max(x0 / ratio, 0), Math.min(x1 / ratio, this.canvas.width - GUTTER)];
      if (label.length * 6.4 + 6 > right - left) continue;
      context.fillStyle = inkOn(colour);
      context.fillText(label, GUTTER + (left + right) / 2, y + 0.5);
    }
  }

  label(course, i) {
    const { words } = this.scene;
    if (!course.attends(i)) return words.ops[course.op[i]].replaceAll("_", "-");
    const blocks = course.blocksOf(i);
    return blocks.length === 1 ? words.shapes[course.block.shape[blocks[0]]] : `${blocks.length} blocks`;
  }

  /** How boxes of a lane are coloured; null for standing still. */
  colours(course, rank, which) {
    const { palette } = this;
    if (which) return (i) => (course.crosses(i) ? palette.inter : palette.intra);
    return (i) => {
      if (course.attends(i)) return state.colour === "rank" ? palette.ranks[rank] : palette.stages[Math.min(course.stage[i], palette.stages.length - 1)];
      return course.op[i] === course.is.wait ? null : palette.work;
    };
  }

  readPalette(course) {
    const { nodes } = this.scene;
    const stages = Array.from({ length: course.numStages }, (_, stage) => both(stageColour(stage, course.numStages)));
    // Messages are paler than the arrows over them.
    const [intra, inter] = [both(theme.intra, 150), both(theme.inter, 150)];
    return { work: both(theme.work), wait: both(theme.wait), intra, inter, stages, ranks: nodes.map((_, rank) => both(rankColour(nodes, rank))) };
  }

  drawOver(context) {
    const course = shown(this.scene);
    const bottom = this.canvas.height - AXIS;
    drawCursor(context, this.canvas, bottom);
    const now = lit();
    if (!course || now?.course !== course) return;
    const { x } = scale(this.canvas);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, this.canvas.width - GUTTER, bottom);
    context.clip();
    context.lineWidth = 2;
    context.strokeStyle = theme.lit;
    for (const i of now.instructions) {
      const [from, to] = course.extent(i).map(x);
      if (to < GUTTER || from > this.canvas.width) continue;
      const which = !course.transfers(i) ? 0 : course.op[i] === course.is.send ? 1 : 2;
      const [y, height] = this.lane(course.rankOf(i), which);
      const wide = Math.max(to - from, 3);
      context.strokeRect(from - 1, y - 1, wide + 2, height + 2);
    }
    const sends = now.instructions.filter((i) => course.op[i] === course.is.send && course.partner[i] >= 0 && course.comm_start[i] >= 0);
    drawArrows(context, course, sends, (tick, rank, into) => this.place(x(tick * course.tick), rank, into), true);
    context.restore();
  }

  rankAt(y) {
    return Math.floor((y + this.top - HEAD) / this.row);
  }

  /** The instruction under a point, or the nearest within a few pixels; -1 for none. */
  find(x, y) {
    const course = shown(this.scene);
    const rank = this.rankAt(y);
    if (!course || x < GUTTER || rank < 0 || rank >= this.scene.numRanks) return -1;
    const within = y - this.lane(rank, 0)[0];
    const [, work] = this.lane(rank, 0), [, thin] = this.lane(rank, 1);
    const { items, start, end, reach } = course.lanes[rank][within < work ? 0 : within < work + thin ? 1 : 2];
    const { seconds, perSecond } = scale(this.canvas);
    const at = seconds(x) / course.tick;
    const near = NEAR / perSecond / course.tick;
    let best = -1, least = near;
    for (let k = firstReaching(reach, at - near); k < items.length && start[items[k]] <= at + near; k++) {
      const i = items[k];
      const away = Math.max(start[i] - at, at - end[i], 0);
      if (away === 0) return i;
      if (away < least) [best, least] = [i, away];
    }
    return best;
  }

  point(x, y, event) {
    const course = shown(this.scene);
    const i = this.find(x, y);
    const same = state.pointed?.course === course && state.pointed?.main.kind === "instruction" && state.pointed.main.at === i;
    const cursor = x >= GUTTER ? scale(this.canvas).seconds(x) : null;
    const pointed = i < 0 ? null : same ? state.pointed : light(course, { kind: "instruction", at: i });
    change("light", { pointed, cursor });
    if (i >= 0) tell(event, describe(course, i));
    else hush();
  }

  press(x, y) {
    const course = shown(this.scene);
    const i = this.find(x, y);
    const rank = this.rankAt(y);
    if (rank >= 0 && rank < this.scene.numRanks) change("rank", { rank });
    change("light", { pinned: i < 0 ? null : light(course, { kind: "instruction", at: i }), pointed: null });
  }
}
