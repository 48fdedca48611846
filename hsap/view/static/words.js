// Words: numbers and instructions as people read them.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];
const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const SPANS_SHOWN = 3;

export function bytes(count) {
  const unit = count < 1024 ? 0 : Math.min(Math.floor(Math.log2(count) / 10), SIZES.length - 1);
  return `${digits(count / 1024 ** unit)} ${SIZES[unit]}`;
}

/** Seconds in the unit that suits `scale`, which defaults to the value itself. */
export function time(seconds, scale = Math.abs(seconds), places = null) {
  if (seconds === 0 && places === null) return "0 s";
  const [unit, name] = TIMES.find(([size]) => scale >= size) ?? TIMES.at(-1);
  return `${places === null ? digits(seconds / unit) : (seconds / unit).toFixed(places)} ${name}`;
}

export const whole = (value) => Math.round(value).toLocaleString("en-US").replaceAll(",", "\u202f");
export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;

/** Three significant digits or more. */
export function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return whole(value);
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** A range of the span table as token positions. */
export function spans(table, from, to) {
  if (from < 0 || to <= from) return "";
  const shown = [];
  for (let i = from; i < Math.min(to, from + SPANS_SHOWN); i++) shown.push(`[${table[2 * i]},${table[2 * i + 1]})`);
  return shown.join(" ") + (to - from > SPANS_SHOWN ? ` +${to - from - SPANS_SHOWN}` : "");
}

/** What one slice looks like, by whether its two diagonals cut it. */
export function kind(slices, s) {
  const low = slices.lo[s] > slices.k0[s] - slices.q1[s] + 1;
  const high = slices.hi[s] < slices.k1[s] - 1 - slices.q0[s];
  return ["full", "causal", "inverse causal", "band"][(low ? 2 : 0) + (high ? 1 : 0)];
}

/** An instruction in the spelling of the text form, without its rows. */
export function spell(vocabulary, course, i) {
  const op = course.op[i];
  const words = [vocabulary.words[op]];
  if (course.role[i] >= 0) words.push(`$${vocabulary.roles[course.role[i]]}`);
  if (course.peer[i] >= 0) words.push(`%${course.peer[i]}`);
  if (course.round[i] >= 0) words.push(`round ${course.round[i]}`);
  const [count, reads] = vocabulary.operands[op];
  const first = course.held.offsets[course.rankOf(i)];
  for (let k = 0; k < count; k++) {
    if (k === reads && count > 1) words.push("→");
    words.push(course.buf[k][i] < 0 ? "–" : `b${course.buf[k][i] - first}`);
  }
  return words.join(" ");
}
