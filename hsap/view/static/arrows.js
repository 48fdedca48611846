// Arrows: transfers, from when the sender's bytes leave to when they are at the receiver.

import { theme } from "./colours.js";

export const MOST = { all: 240, ofRank: 600 };

/** Sends that are on their way in [from, to] ticks, all of them or those that touch a rank; null if too many. */
export function underWay(course, from, to, most, rank = null) {
  const out = [];
  for (let r = 0; r < course.lanes.length; r++) {
    const { items, start, end, reach } = course.lanes[r][1];
    let k = firstReaching(reach, from);
    for (; k < items.length && start[items[k]] <= to; k++) {
      const i = items[k];
      if (end[i] < from || course.partner[i] < 0) continue;
      if (rank !== null && r !== rank && course.peer[i] !== rank) continue;
      out.push(i);
      if (out.length > most) return null;
    }
  }
  return out;
}

export function firstReaching(reach, wanted) {
  let from = 0, to = reach.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (reach[middle] < wanted) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** Draw sends as arrows. place: gives the pixels of a time in ticks on a rank's lane of messages. */
export function drawArrows(context, course, sends, place, bold) {
  for (const crosses of [false, true]) {
    context.strokeStyle = context.fillStyle = crosses ? theme.inter : theme.intra;
    context.globalAlpha = bold ? 1 : sends.length > 150 ? 0.4 : 0.8;
    context.lineWidth = bold ? 2 : 1.2;
    const lines = new Path2D(), heads = new Path2D();
    for (const i of sends) {
      if (course.crosses(i) !== crosses) continue;
      const met = course.partner[i];
      const a = place(course.comm_start[i], course.rankOf(i), false), b = place(course.comm_end[met], course.rankOf(met), true);
      arrow(lines, heads, a, b, bold ? 9 : 7);
    }
    context.stroke(lines);
    context.fill(heads);
  }
  context.globalAlpha = 1;
}

function arrow(lines, heads, [x0, y0], [x1, y1], size) {
  const bend = Math.min(Math.abs(x1 - x0) / 2, 40);
  lines.moveTo(x0, y0);
  lines.bezierCurveTo(x0 + bend, y0, x1 - bend - size, y1, x1 - size, y1);
  heads.moveTo(x1, y1);
  heads.lineTo(x1 - size, y1 - size / 2);
  heads.lineTo(x1 - size, y1 + size / 2);
  heads.closePath();
}
