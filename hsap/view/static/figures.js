// Figures: the numbers to compare plans by.

import { element } from "./canvas.js";
import { bytes, time, whole } from "./words.js";

const ratio = (value) => (value === null ? "–" : value.toFixed(3));
const seconds = (value) => (value === null ? "–" : time(value));

/** Name, help, how it is read from figures and direction, how it is spelt, whether less is better. */
const ROWS = [
  ["time of a layer", "attention, forward and backward", (f) => sum(f, "seconds"), seconds, true],
  ["bytes sent", "by all ranks, both directions", (f) => sum(f, "bytes_total"), bytes, true],
  ["between nodes", "the part that leaves its node", (f) => sum(f, "bytes_internode"), bytes, true],
  ["largest receive", "by one rank in one direction", (f) => most(f, "max_recv_bytes_per_rank"), bytes, true],
  ["peak memory", "of communication buffers on one rank", (f) => most(f, "peak_buffer_bytes_per_rank"), bytes, true],
  ["area imbalance", "visible pairs, largest rank / mean", (f) => f.area_imbalance, ratio, true],
  ["token imbalance", "tokens, largest rank / mean", (f) => f.token_imbalance, ratio, true],
  ["stages", "of blocks that overlap with transfers", (f) => f.stages, whole, false],
  ["instructions", "of all ranks", (f) => f.instructions, whole, false],
];

function sum(figures, name) {
  const [a, b] = [figures.forward[name], figures.backward[name]];
  return a === null || b === null ? null : a + b;
}

const most = (figures, name) => Math.max(figures.forward[name], figures.backward[name]);

/** Figures of one plan as tiles, of two as a table with their ratio. */
export function figures(scenes) {
  if (scenes.length === 1) {
    return element("dl", { class: "tiles" }, ...ROWS.map(([name, help, read, spell]) =>
      element("div", { title: help }, element("dt", {}, name), element("dd", {}, spell(read(scenes[0].figures))))));
  }
  const head = element("tr", {}, element("th", { scope: "col" }, ""), ...scenes.map((scene) => element("th", { scope: "col" }, scene.title)),
    element("th", { scope: "col" }, "ratio"));
  const body = ROWS.map(([name, help, read, spell, lessIsBetter]) => {
    const values = scenes.map((scene) => read(scene.figures));
    const least = Math.min(...values.filter((value) => value !== null));
    const cells = values.map((value) => element("td", { class: lessIsBetter && value === least && values[0] !== values[1] ? "best" : null }, spell(value)));
    const part = values.includes(null) || !values[0] ? "–" : `${(values[1] / values[0]).toFixed(2)} ×`;
    return element("tr", {}, element("th", { scope: "row" }, name, element("small", {}, help)), ...cells, element("td", { class: "quiet" }, part));
  });
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
}
