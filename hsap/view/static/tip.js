// Tip: the small card beside the pointer that says what is under it.

import { element } from "./canvas.js";
import { bytes, kind, percent, spans, spell, time, whole } from "./words.js";

const SHOWN = 4;
let card = null;

/** Show lines beside the pointer; the first one is the title. */
export function tell(event, lines) {
  card ??= document.body.appendChild(element("div", { id: "tip", role: "status" }));
  card.replaceChildren(...lines.filter(Boolean).map((line, i) => element(i ? "span" : "b", {}, line)));
  card.hidden = false;
  const { offsetWidth: w, offsetHeight: h } = card;
  const left = event.clientX + 16 + w > innerWidth ? event.clientX - w - 12 : event.clientX + 16;
  const top = event.clientY + 18 + h > innerHeight ? event.clientY - h - 12 : event.clientY + 18;
  card.style.transform = `translate(${Math.max(left, 4)}px, ${Math.max(top, 4)}px)`;
}

export function hush() {
  if (card) card.hidden = true;
}

/** What an instruction is, line by line. */
export function describe(course, i) {
  const { scene } = course;
  const rank = course.rankOf(i);
  const [from, to] = course.extent(i);
  const lines = [
    `rank ${rank} · #${i - course.offsets[rank]} · stage ${course.stage[i]}`,
    spell(scene.words, course, i),
    `${time(from)} – ${time(to)} (${time(to - from)})`,
  ];
  const rows = spans(scene.columns.spans, course.rows0[i], course.rows1[i]);
  if (rows) lines.push(`tokens ${rows}`);
  if (course.bytes[i] > 0) lines.push(`${bytes(course.bytes[i])} sent`);
  if (course.transfers(i)) {
    const met = course.partner[i];
    const where = course.crosses(i) ? "between nodes" : "inside the node";
    const other = `rank ${course.peer[i]}${met < 0 ? "" : `’s #${met - course.offsets[course.peer[i]]}`}`;
    lines.push(`${course.op[i] === course.is.send ? "to" : "from"} ${other}, ${where}`);
    if (course.op[i] === course.is.recv && met >= 0) lines.push(`${bytes(course.bytes[met])} received`);
  }
  const blocks = course.attends(i) ? course.blocksOf(i) : [];
  for (const b of blocks.slice(0, SHOWN)) lines.push(blockName(course, b));
  if (blocks.length > SHOWN) lines.push(`and ${blocks.length - SHOWN} more blocks`);
  return lines;
}

export function blockName(course, b) {
  const { block, scene } = course;
  return `${scene.words.shapes[block.shape[b]]} block, q shard ${block.q[b]} × kv shard ${block.kv[b]}`;
}

/** What a block is and who computes it when. */
export function describeBlock(course, b, q, k) {
  const pieces = course.pieces.of(b);
  const attenders = [...new Set([...pieces].flatMap((s) => [...course.attenders.of(s)]))];
  const who = attenders.slice(0, SHOWN).map((i) => {
    const rank = course.rankOf(i);
    return `rank ${rank} in stage ${course.stage[i]}, #${i - course.offsets[rank]}`;
  });
  return [
    blockName(course, b),
    `query ${whole(q)}, key ${whole(k)}`,
    `${whole(course.block.area[b])} visible pairs` + (pieces.length > 1 ? ` in ${whole(pieces.length)} slices` : `, ${kind(course.slice, pieces[0])}`),
    ...who,
    attenders.length > SHOWN ? `and ${attenders.length - SHOWN} more` : null,
  ];
}

export function describeBuffer(course, b) {
  const { held, scene } = course;
  const rank = above0(held.offsets, b);
  const role = held.role[b] < 0 ? "scratch" : `$${scene.words.roles[held.role[b]]}`;
  const life = held.begin[b] < 0 ? "never used" : `${time(course.start[held.begin[b]] * course.tick)} – ${time(course.end[held.end[b]] * course.tick)}`;
  return [
    `rank ${rank} · b${b - held.offsets[rank]} · ${role}${held.acc[b] ? ", accumulator" : ""}`,
    `${bytes(held.bytes[b])} of ${scene.words.spaces[held.space[b]]}` + (held.at[b] >= 0 ? ` at ${bytes(held.at[b])}` : ""),
    `held ${life}`,
    `tokens ${spans(scene.columns.spans, held.rows0[b], held.rows1[b]) || "–"}`,
  ];
}

function above0(offsets, item) {
  let owner = 0;
  while (offsets[owner + 1] <= item) owner++;
  return owner;
}

/** Where a rank's time went. */
export function describeSpent(course, rank) {
  const names = ["attention", "copies, merges, sums", "waiting for messages", "between instructions", "done before the last rank"];
  const parts = course.spent[rank].map((part, i) => (part > 0 ? `${names[i]} ${time(part)}, ${percent(part / course.makespan)}` : null));
  return [`rank ${rank} · node ${course.scene.nodes[rank]}`, ...parts];
}
