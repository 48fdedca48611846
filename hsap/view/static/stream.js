// Stream: the instructions of the chosen rank as a list; only the lines in sight exist.

import { element } from "./canvas.js";
import { light } from "./course.js";
import { change, lit, on, reveal, shown, state, watched } from "./state.js";
import { describe, hush, tell } from "./tip.js";
import { spans, spell, time } from "./words.js";

const LINE = 22;
const SPARE = 6;

export class Stream {
  constructor(scene) {
    this.scene = scene;
    this.rank = 0;
    this.body = element("div", { class: "lines" });
    this.list = element(
      "div",
      { class: "stream", tabindex: 0, role: "listbox", "aria-label": "Instructions of the chosen rank" },
      this.body,
    );
    this.picker = element("select", { "aria-label": "Rank", onchange: () => change("rank", { rank: Number(this.picker.value) }) });
    for (let rank = 0; rank < scene.numRanks; rank++) this.picker.append(element("option", { value: rank }, `rank ${rank}`));
    this.count = element("span", { class: "quiet" });
    this.host = element("div", {}, element("div", { class: "picker" }, this.picker, this.count), this.list);
    this.list.addEventListener("scroll", () => this.draw());
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("pointerover", (event) => this.point(event));
    this.list.addEventListener("pointerleave", () => {
      hush();
      change("light", { pointed: null });
    });
    this.list.addEventListener("click", (event) => this.press(event));
    this.list.addEventListener("dblclick", () => lit() && reveal(lit().course, lit().instructions[0]));
    on("program rank", () => this.ask(true));
    on("light", () => this.ask(watched(scene) !== this.rank));
  }

  /** First and last + 1 instruction of the rank. */
  get extent() {
    const course = shown(this.scene);
    return course ? [course.offsets[this.rank], course.offsets[this.rank + 1]] : [0, 0];
  }

  /** Bring the list up to date in the next frame; refill: for another rank or program. */
  ask(refill) {
    this.refill ||= refill;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.refill) this.fill();
      else this.mark();
    });
  }

  fill() {
    this.refill = false;
    this.rank = watched(this.scene);
    const [from, to] = this.extent;
    this.picker.value = String(this.rank);
    this.count.textContent = `${(to - from).toLocaleString("en-US")} instructions`;
    this.body.style.height = `${(to - from) * LINE}px`;
    this.drawn = null;
    this.list.scrollTop = 0;
    this.draw();
  }

  draw() {
    const course = shown(this.scene);
    const [from, to] = this.extent;
    this.follow();
    const first = Math.max(Math.floor(this.list.scrollTop / LINE) - SPARE, 0);
    const last = Math.min(first + Math.ceil(this.list.clientHeight / LINE) + 2 * SPARE, to - from);
    const drawn = `${first} ${last}`;
    if (drawn === this.drawn) return this.mark();
    this.drawn = drawn;
    const lines = [];
    for (let line = first; line < last; line++) lines.push(this.line(course, from + line, line));
    this.body.replaceChildren(...lines);
    return this.mark();
  }

  line(course, i, number) {
    const fresh = number === 0 || course.stage[i] !== course.stage[i - 1];
    const rows = spans(this.scene.columns.spans, course.rows0[i], course.rows1[i]);
    const blocks = course.attends(i) ? course.blocksOf(i) : [];
    const shape = blocks.length === 1 ? this.scene.words.shapes[course.block.shape[blocks[0]]] : blocks.length ? `${blocks.length} blocks` : rows;
    const [start, end] = course.extent(i);
    return element(
      "div",
      { class: fresh ? "line fresh" : "line", role: "option", id: `line-${this.scene.index}-${i}`, "data-at": i,
        style: `top:${number * LINE}px`, "aria-selected": false },
      element("i", {}, fresh ? `s${course.stage[i]}` : ""),
      element("b", {}, String(number)),
      element("code", { "data-op": this.scene.words.ops[course.op[i]] }, spell(this.scene.words, course, i)),
      element("small", {}, shape),
      element("time", {}, end > start ? time(end - start) : ""),
    );
  }

  /** Mark what is lit; other panels may have lit instructions of this rank. */
  mark() {
    const course = shown(this.scene);
    const now = lit();
    const among = new Set(now?.course === course ? now.instructions : []);
    for (const line of this.body.children) {
      const on = among.has(Number(line.dataset.at));
      line.classList.toggle("lit", on);
      line.setAttribute("aria-selected", on);
    }
    if (now !== this.marked) this.follow();
    this.marked = now;
  }

  /** Scroll to what is lit, where it is this rank's and out of sight. */
  follow() {
    const now = lit();
    const [from, to] = this.extent;
    if (!now || now.course !== shown(this.scene)) return;
    const i = now.instructions.find((each) => each >= from && each < to);
    // Under the pointer nothing moves by itself.
    if (i === undefined || now === this.marked || this.list.matches(":hover")) return;
    const top = (i - from) * LINE;
    const { scrollTop, clientHeight } = this.list;
    if (top < scrollTop || top + LINE > scrollTop + clientHeight) this.list.scrollTop = top - clientHeight / 2;
    this.list.setAttribute("aria-activedescendant", `line-${this.scene.index}-${i}`);
  }

  point(event) {
    const at = event.target.closest(".line")?.dataset.at;
    const course = shown(this.scene);
    if (at === undefined || !course) return;
    change("light", { pointed: light(course, { kind: "instruction", at: Number(at) }) });
    tell(event, describe(course, Number(at)));
  }

  press(event) {
    const at = event.target.closest(".line")?.dataset.at;
    if (at !== undefined) this.pin(Number(at));
  }

  pin(i) {
    const course = shown(this.scene);
    change("light", { pinned: light(course, { kind: "instruction", at: i }), pointed: null });
    reveal(course, i);
  }

  key(event) {
    const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const [from, to] = this.extent;
    if (from === to) return;
    const main = state.pinned?.course === shown(this.scene) ? state.pinned.main : null;
    const now = main?.kind === "instruction" && main.at >= from && main.at < to ? main.at : from - 1;
    this.pin(Math.min(Math.max(now + steps[event.key], from), to - 1));
  }
}
