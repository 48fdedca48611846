// Links: bytes from every rank to every other, as a heat map with the nodes' borders.

import { Canvas, drawSides, follow } from "./canvas.js";
import { heat, theme } from "./colours.js";
import { light } from "./course.js";
import { change, lit, on, shown, state } from "./state.js";
import { hush, tell } from "./tip.js";
import { bytes, whole } from "./words.js";

const MARGIN = 30;

export class Links {
  constructor(scene) {
    this.scene = scene;
    this.canvas = new Canvas("Bytes per link", (width) => Math.min(width, 480), (c) => this.draw(c), (c) => this.drawOver(c));
    this.host = this.canvas.host;
    follow(this.canvas, {
      point: (x, y, event) => this.point(x, y, event),
      leave: () => {
        hush();
        change("light", { pointed: null });
      },
      press: (x, y) => change("light", { pinned: this.find(x, y)?.shown ?? null, pointed: null }),
    });
    on("program paint", () => this.canvas.repaint());
    on("light", () => this.canvas.repaintOver());
  }

  get cell() {
    return (Math.min(this.canvas.width, this.canvas.height) - MARGIN - 1) / this.scene.numRanks;
  }

  draw(context) {
    const { cell } = this;
    const { nodes, numRanks } = this.scene;
    const course = shown(this.scene);
    const side = cell * numRanks;
    context.fillStyle = theme.plot;
    context.fillRect(MARGIN, MARGIN, side, side);
    context.fillStyle = theme.faint;
    for (let rank = 0; rank < numRanks; rank++) context.fillRect(MARGIN + rank * cell, MARGIN + rank * cell, cell, cell);
    if (course) {
      const { src, dst, bytes: size } = course.link;
      const most = size.reduce((a, b) => Math.max(a, b), 1);
      for (let l = 0; l < src.length; l++) {
        // A square root, so that small links are told from none.
        context.fillStyle = heat(nodes[src[l]] !== nodes[dst[l]], Math.sqrt(size[l] / most));
        context.fillRect(MARGIN + dst[l] * cell, MARGIN + src[l] * cell, cell > 5 ? cell - 1 : cell, cell > 5 ? cell - 1 : cell);
      }
    }
    this.drawBorders(context, side);
    this.drawLabels(context);
  }

  drawBorders(context, side) {
    const { nodes, numRanks } = this.scene;
    context.strokeStyle = theme.muted;
    context.lineWidth = 1;
    context.strokeRect(MARGIN - 0.5, MARGIN - 0.5, side + 1, side + 1);
    for (let rank = 1; rank < numRanks; rank++) {
      if (nodes[rank] === nodes[rank - 1]) continue;
      const at = Math.round(MARGIN + rank * this.cell) - 0.5;
      context.beginPath();
      context.moveTo(at, MARGIN);
      context.lineTo(at, MARGIN + side);
      context.moveTo(MARGIN, at);
      context.lineTo(MARGIN + side, at);
      context.stroke();
    }
  }

  drawLabels(context) {
    const { cell } = this;
    const every = Math.ceil(18 / cell);
    context.fillStyle = theme.muted;
    context.textBaseline = "middle";
    for (let rank = 0; rank < this.scene.numRanks; rank += every) {
      const at = MARGIN + (rank + 0.5) * cell;
      context.textAlign = "right";
      context.fillText(String(rank), MARGIN - 5, at);
      context.textAlign = "center";
      context.fillText(String(rank), at, MARGIN - 8);
    }
    drawSides(context, MARGIN, 7, "to →", "← from");
  }

  drawOver(context) {
    const now = lit();
    if (!now || now.course !== shown(this.scene)) return;
    context.strokeStyle = theme.lit;
    context.lineWidth = 2;
    for (const [src, dst] of now.links) {
      context.strokeRect(MARGIN + dst * this.cell - 1, MARGIN + src * this.cell - 1, this.cell + 1, this.cell + 1);
    }
  }

  /** The link under a point: its ranks, and what lights up where bytes cross it. */
  find(x, y) {
    const course = shown(this.scene);
    const [src, dst] = [y, x].map((place) => Math.floor((place - MARGIN) / this.cell));
    const { numRanks } = this.scene;
    if (!course || src < 0 || dst < 0 || src >= numRanks || dst >= numRanks) return null;
    const at = course.link.src.findIndex((from, l) => from === src && course.link.dst[l] === dst);
    return { src, dst, at, shown: at < 0 ? null : light(course, { kind: "link", src, dst }) };
  }

  point(x, y, event) {
    const found = this.find(x, y);
    const { pointed } = state;
    const same = pointed?.main.kind === "link" && pointed.main.src === found?.src && pointed.main.dst === found?.dst;
    if (!same) change("light", { pointed: found?.shown ?? null });
    if (!found) return hush();
    const { nodes } = this.scene;
    const { link } = shown(this.scene);
    const where = nodes[found.src] === nodes[found.dst] ? "inside a node" : `node ${nodes[found.src]} to node ${nodes[found.dst]}`;
    const what = found.at < 0 ? "nothing sent" : `${bytes(link.bytes[found.at])} in ${whole(link.messages[found.at])} messages`;
    return tell(event, [`rank ${found.src} → rank ${found.dst}`, what, where]);
  }
}
