// Waiting: where each rank's time went, as one bar a rank.

import { Canvas, follow } from "./canvas.js";
import { theme } from "./colours.js";
import { chooseRank, GUTTER } from "./plot.js";
import { change, longest, on, shown, state } from "./state.js";
import { describeSpent, hush, tell } from "./tip.js";
import { percent } from "./words.js";

const HEAD = 4;

export class Waiting {
  constructor(scene) {
    this.scene = scene;
    this.row = Math.min(Math.max(Math.floor(320 / scene.numRanks), 5), 34);
    this.canvas = new Canvas("Where each rank's time went", HEAD + this.row * scene.numRanks, (c) => this.draw(c), () => {});
    this.host = this.canvas.host;
    const rankAt = (y) => Math.min(Math.max(Math.floor((y - HEAD) / this.row), 0), scene.numRanks - 1);
    follow(this.canvas, {
      point: (x, y, event) => shown(scene) && tell(event, describeSpent(shown(scene), rankAt(y))),
      leave: hush,
      press: (x, y) => change("rank", { rank: rankAt(y) }),
    });
    this.host.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowUp" && event.key !== "ArrowDown") return;
      event.preventDefault();
      chooseRank(event.key === "ArrowUp" ? -1 : 1);
    });
    on("program paint rank", () => this.canvas.repaint());
  }

  draw(context) {
    const course = shown(this.scene);
    if (!course) return;
    const per = (this.canvas.width - GUTTER) / longest();
    const colours = partColours();
    const every = Math.ceil(12 / this.row);
    context.textAlign = "right";
    context.textBaseline = "middle";
    course.spent.forEach((parts, rank) => {
      const y = HEAD + rank * this.row;
      const high = this.row > 6 ? this.row - 2 : this.row - 1;
      let x = GUTTER;
      parts.forEach((seconds, part) => {
        context.fillStyle = colours[part];
        context.fillRect(x, y, seconds * per, high);
        x += seconds * per;
      });
      const chosen = rank === state.rank;
      if (rank % every && !chosen) return;
      context.fillStyle = chosen ? theme.ink : theme.muted;
      context.fillText(`r${rank}`, GUTTER - 8, y + high / 2 + 0.5);
    });
  }
}

/** Colours of attention, other work, exposed communication, gaps, and being done. */
export const partColours = () => [theme.accent, theme.work, theme.inter, theme.line, theme.faint];

/** Shares of all ranks' time, in words. */
export function shares(course) {
  const total = course.spent.map((parts) => parts.reduce((a, b) => a + b, 0)).reduce((a, b) => a + b, 0) || 1;
  const sums = [0, 1, 2, 3, 4].map((part) => course.spent.reduce((sum, parts) => sum + parts[part], 0) / total);
  const names = ["attention", "other work", "waiting for messages", "between instructions", "done early (imbalance)"];
  return sums.map((sum, part) => (sum >= 0.0005 ? `${names[part]} ${percent(sum)}` : null)).filter(Boolean).join(" · ");
}
