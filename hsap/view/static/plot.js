// Plot: what the panels over time have in common: their scale, ticks, cursor and keys.

import { navigate } from "./canvas.js";
import { theme } from "./colours.js";
import { change, longest, look, state, zoomTime } from "./state.js";
import { time } from "./words.js";

export const GUTTER = 46;
export const AXIS = 20;

/** From seconds to pixels and back, for a canvas with a gutter at its left. */
export function scale(canvas) {
  const [from, to] = state.range;
  const perSecond = Math.max(canvas.width - GUTTER, 1) / (to - from);
  return {
    perSecond,
    x: (seconds) => GUTTER + (seconds - from) * perSecond,
    seconds: (x) => from + (x - GUTTER) / perSecond,
  };
}

/** Ticks of the time axis along the bottom, as few as can be read. */
export function drawTicks(context, canvas, top, bottom) {
  const [from, to] = state.range;
  const { x } = scale(canvas);
  const rough = ((to - from) / Math.max(canvas.width - GUTTER, 1)) * 110;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((nice) => nice * power >= rough);
  const unit = Math.max(Math.abs(to), step);
  const unitSize = [1, 1e-3, 1e-6, 1e-9].find((size) => unit >= size) ?? 1e-9;
  const places = Math.max(0, Math.ceil(-Math.log10(step / unitSize) - 1e-9));
  context.fillStyle = theme.muted;
  context.strokeStyle = theme.faint;
  context.lineWidth = 1;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  context.beginPath();
  for (let tick = Math.ceil(from / step); tick * step <= to; tick++) {
    const at = Math.round(x(tick * step)) + 0.5;
    if (at < GUTTER) continue;
    context.moveTo(at, top);
    context.lineTo(at, bottom);
    if (at > GUTTER + 16 && at < canvas.width - 24) context.fillText(time(tick * step, unit, places), at, bottom + 14);
  }
  context.stroke();
}

/** The hairline under the pointer, in every panel over time. */
export function drawCursor(context, canvas, bottom) {
  if (state.cursor === null) return;
  const at = Math.round(scale(canvas).x(state.cursor)) + 0.5;
  if (at < GUTTER || at > canvas.width) return;
  context.strokeStyle = theme.muted;
  context.globalAlpha = 0.5;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(at, 0);
  context.lineTo(at, bottom);
  context.stroke();
  context.globalAlpha = 1;
}

/** Let a canvas pan and zoom the common time range. up, down: what those keys do. */
export function overTime(canvas, { scroll = () => {}, up = () => {}, down = () => {} } = {}) {
  const pan = (dx) => look(state.range[0] - dx / scale(canvas).perSecond, state.range[1] - dx / scale(canvas).perSecond);
  navigate(canvas, {
    pan: (dx, dy) => {
      pan(dx);
      scroll(-dy);
    },
    zoom: (factor, x) => zoomTime(factor, scale(canvas).seconds(x)),
  });
  const middle = () => (state.range[0] + state.range[1]) / 2;
  const keys = {
    ArrowLeft: () => pan(60),
    ArrowRight: () => pan(-60),
    ArrowUp: up,
    ArrowDown: down,
    "+": () => zoomTime(1.5, middle()),
    "=": () => zoomTime(1.5, middle()),
    "-": () => zoomTime(1 / 1.5, middle()),
    0: () => change("range", { range: [0, longest()] }),
  };
  canvas.host.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
}

/** Choose another rank, by how many further. */
export function chooseRank(step) {
  const last = Math.max(...state.scenes.map((scene) => scene.numRanks)) - 1;
  change("rank", { rank: Math.min(Math.max(state.rank + step, 0), last) });
}
