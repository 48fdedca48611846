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
    context.strokeStyle = crosses ? theme.inter : theme.intra;
    context.fillStyle = context.strokeStyle;
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
    // A rim, so that heads are seen on messages of their own colour.
    context.strokeStyle = theme.plot;
    context.stroke(heads);
    context.fill(heads);
  }
  context.globalAlpha = 1;
}

/** A line that leaves and arrives upright, and its head. */
function arrow(lines, heads, [x0, y0], [x1, y1], size) {
  const down = Math.sign(y1 - y0) || 1;
  const end = y1 - down * size;
  const bend = Math.max(Math.abs(end - y0) / 2, size) * down;
  lines.moveTo(x0, y0);
  lines.bezierCurveTo(x0, y0 + bend, x1, end - bend, x1, end);
  heads.moveTo(x1, y1);
  heads.lineTo(x1 - size * 0.55, end);
  heads.lineTo(x1 + size * 0.55, end);
  heads.closePath();
}
