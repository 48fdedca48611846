// State: what is chosen, looked at and pointed at; every panel reads it and is told when it changes.

/**
 * scenes: what `openScene` gives. mask, direction: indices. colour: "rank" or "stage". rank: whose stream is shown.
 * range: seconds [from, to] of all time axes. sight: part of the matrix [q, k, size] in tokens.
 * pointed, pinned: what lights up, see `light`; pinned stays when the pointer leaves. cursor: seconds or null.
 */
export const state = {
  scenes: [], mask: 0, direction: 0, colour: "rank", rank: 0, arrows: true,
  range: [0, 1], sight: [0, 0, 1], pointed: null, pinned: null, cursor: null,
};

const listeners = new Map();

/** Call `listener` after any of these changes: program, paint, range, sight, light, rank. */
export function on(kinds, listener) {
  for (const kind of kinds.split(" ")) listeners.set(kind, [...(listeners.get(kind) ?? []), listener]);
}

export function change(kind, values) {
  Object.assign(state, values);
  for (const listener of listeners.get(kind) ?? []) listener();
}

/** The course that a scene shows; null where nothing was measured. */
export const shown = (scene) => scene.course(state.mask, state.direction);

export const courses = () => state.scenes.map(shown).filter(Boolean);

export const longest = () => Math.max(...courses().map((course) => course.makespan), 1e-12);

/** What lights up now: what is pointed at, else what is pinned. */
export const lit = () => state.pointed ?? state.pinned;

/** The rank whose stream and memory a scene shows: that of what is pointed at in it, else the chosen one. */
export function watched(scene) {
  const now = state.pointed;
  const follows = now?.course.scene === scene && now.instructions.length && ["instruction", "block"].includes(now.main.kind);
  return Math.min(follows ? now.course.rankOf(now.instructions[0]) : state.rank, scene.numRanks - 1);
}

/** Change the time range, kept inside what there is to see. */
export function look(from, to) {
  const all = longest();
  const size = Math.min(Math.max(to - from, all * 1e-6), all * 1.02);
  const start = Math.min(Math.max(from, -0.01 * all), 1.01 * all - size);
  change("range", { range: [start, start + size] });
}

/** Zoom the time range by a factor about a time. */
export function zoomTime(factor, about) {
  const [from, to] = state.range;
  look(about - (about - from) / factor, about + (to - about) / factor);
}

/** Bring an instruction into view, where it lies outside or is too small to see. */
export function reveal(course, i) {
  const [from, to] = course.extent(i);
  const [left, right] = state.range;
  const tiny = (to - from) / (right - left) < 0.002;
  if (from >= left && to <= right && !tiny) return;
  const size = tiny ? Math.max((to - from) * 40, longest() * 1e-5) : right - left;
  look((from + to - size) / 2, (from + to + size) / 2);
}
