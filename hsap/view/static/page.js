// Page: opens the scenes, lays the panels out and ties the controls to the state.

import { element } from "./canvas.js";
import { unpack } from "./columns.js";
import { rankColour, readTheme, roleColour, stageColour, theme } from "./colours.js";
import { openScene } from "./course.js";
import { figures } from "./figures.js";
import { Links } from "./links.js";
import { Matrix } from "./matrix.js";
import { Memory } from "./memory.js";
import { change, courses, longest, on, shown, state, zoomTime } from "./state.js";
import { Stream } from "./stream.js";
import { Timeline } from "./timeline.js";
import { partColours, shares, Waiting } from "./waiting.js";
import { whole } from "./words.js";

const MOST_KEYS = 16;

/** Heading, one sentence for a newcomer, the panel, and its legend. */
const PANELS = {
  matrix: ["Attention matrix", "Which query sees which key. Each block of visible pairs has the colour of the rank that computes it, or of the stage in which it does; thin lines part shards, thick ones documents, and the coloured edge says which rank a token lives on.", Matrix, paintLegend],
  timeline: ["Timeline", "What every rank does when: the tall row is its compute stream, the two thin ones messages going out and coming in, and an arrow takes each message from sender to receiver. Where messages are too many, only the chosen rank’s are drawn.", Timeline, timeLegend],
  stream: ["Instructions", "The program of the chosen rank, in the order in which it runs. Point at a line to light it everywhere, click to keep it lit.", Stream, null],
  memory: ["Memory", "Above, bytes of the communication arena in use: the line is the chosen rank, the band all ranks. Below, that rank’s arena: each box is a buffer, as high as it is large and as wide as it lives.", Memory, roleLegend],
  links: ["Bytes per link", "What each rank (row) sends each other rank (column); lines part the nodes.", Links, linkLegend],
  waiting: ["Where the time goes", "Each rank’s time from the start until the last rank is done.", Waiting, partLegend],
};

async function open() {
  const { words, scenes } = JSON.parse(document.getElementById("data").textContent);
  readTheme();
  state.scenes = await Promise.all(scenes.map(async (value, index) => openScene(value, await unpack(value), words, index)));
  state.direction = [0, 1].find((d) => state.scenes.every((scene) => scene.course(0, d))) ?? 0;
  state.range = [0, longest()];
  state.sight = [0, 0, state.scenes[0].tokens];
  const main = document.querySelector("main");
  main.dataset.plans = state.scenes.length;
  main.replaceChildren(
    element("section", { class: "panel wide", id: "figures" }, figures(state.scenes)),
    ...Object.entries(PANELS).map(([name, panel]) => section(name, ...panel)),
  );
  document.getElementById("about").replaceChildren(...state.scenes.map(about));
  document.querySelector("header").append(controls());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);
  addEventListener("keydown", (event) => event.key === "Escape" && change("light", { pinned: null, pointed: null }));
  change("program");
  change("paint");
  document.documentElement.dataset.ready = "true";
}

function repaintAll() {
  readTheme();
  change("paint");
}

function about(scene) {
  const options = Object.entries(scene.options).map(([name, value]) => `${name}=${value}`).join(", ");
  const numDocuments = scene.columns.borders.length - 1;
  const batch = `${whole(scene.tokens)} tokens in ${whole(numDocuments)} ${numDocuments === 1 ? "document" : "documents"}`;
  const numNodes = new Set(scene.nodes).size;
  const where = `${scene.numRanks} ranks (${scene.topology}) on ${numNodes} ${numNodes === 1 ? "node" : "nodes"}`;
  return element("p", {}, element("b", {}, scene.title), ` ${scene.title === scene.planner ? "" : `${scene.planner} `}${options ? `(${options}) ` : ""}· ${batch} · ${where} · heads ${scene.heads} ${scene.dtype} · ${scene.note}`);
}

function section(name, title, help, Panel, legend) {
  const views = state.scenes.map((scene) => {
    const none = element("p", { class: "none", hidden: true }, "Nothing was measured for this mask and direction.");
    const share = name === "waiting" ? element("p", { class: "share" }) : null;
    on("program", () => {
      none.hidden = Boolean(shown(scene));
      if (share) share.textContent = shown(scene) ? shares(shown(scene)) : "";
    });
    const heading = state.scenes.length > 1 ? element("h3", {}, scene.title) : null;
    const made = element("div", { class: "view" }, heading, share, none, new Panel(scene).host);
    made.dataset.scene = scene.index;
    return made;
  });
  const keys = element("div", { class: "legend" });
  if (legend) on("paint program", () => keys.replaceChildren(...legend()));
  const zoom = name === "timeline" ? zoomButtons() : null;
  return element("section", { class: "panel", id: name, "aria-labelledby": `${name}-title` },
    element("div", { class: "title" }, element("h2", { id: `${name}-title` }, title), zoom),
    element("p", { class: "help" }, help), element("div", { class: "views" }, ...views), keys);
}

function zoomButtons() {
  const middle = () => (state.range[0] + state.range[1]) / 2;
  const button = (label, name, press) => element("button", { type: "button", "aria-label": name, title: name, onclick: press }, label);
  return element("div", { class: "buttons" },
    element("span", { class: "quiet hint" }, "drag to pan · Ctrl + scroll to zoom"),
    button("+", "Zoom in", () => zoomTime(2, middle())),
    button("−", "Zoom out", () => zoomTime(0.5, middle())),
    button("all", "Show all", () => change("range", { range: [0, longest()] })));
}

function controls() {
  const { masks } = state.scenes[0];
  const reset = () => {
    change("light", { pinned: null, pointed: null });
    change("range", { range: [0, longest()] });
    change("program");
    change("paint");
  };
  const choices = [
    choice("Direction", ["forward", "backward"], () => state.direction, (direction) => { state.direction = direction; reset(); }),
    choice("Colour by", ["rank", "stage"], () => ["rank", "stage"].indexOf(state.colour), (at) => change("paint", { colour: ["rank", "stage"][at] })),
    choice("Arrows", ["on", "off"], () => (state.arrows ? 0 : 1), (at) => change("paint", { arrows: at === 0 })),
    choice("Theme", ["auto", "light", "dark"], () => 0, (at) => {
      if (at) document.documentElement.dataset.theme = ["auto", "light", "dark"][at];
      else delete document.documentElement.dataset.theme;
      repaintAll();
    }),
  ];
  if (masks.length > 1) {
    const select = element("select", { "aria-label": "Mask", onchange: () => { state.mask = Number(select.value); reset(); } },
      ...masks.map((mask, i) => element("option", { value: i }, `${mask.name} (${mask.layers} ${mask.layers === 1 ? "layer" : "layers"})`)));
    choices.unshift(element("label", { class: "choice" }, element("span", {}, "Mask"), select));
  }
  return element("div", { class: "controls" }, ...choices);
}

/** A row of buttons of which one is down. */
function choice(name, labels, read, pick) {
  const buttons = labels.map((label, at) => element("button", { type: "button", "aria-pressed": at === read(), onclick: () => {
    pick(at);
    buttons.forEach((button, each) => button.setAttribute("aria-pressed", each === at));
  } }, label));
  return element("div", { class: "choice", role: "group", "aria-label": name }, element("span", {}, name), element("div", { class: "switch" }, ...buttons));
}

const key = (colour, label, thin = false) => {
  const patch = element("i", { class: thin ? "thin" : "" });
  patch.style.background = colour;
  return element("span", {}, patch, label);
};

function paintLegend() {
  const scene = state.scenes[0];
  if (state.colour === "stage") {
    const stages = Math.max(...courses().map((course) => course.numStages), 1);
    const shownStages = Array.from({ length: Math.min(stages, MOST_KEYS) }, (_, at) => Math.round((at * (stages - 1)) / Math.max(Math.min(stages, MOST_KEYS) - 1, 1)));
    return shownStages.map((stage) => key(stageColour(stage, stages), `stage ${stage}`));
  }
  const ranks = Array.from({ length: Math.min(scene.numRanks, MOST_KEYS) }, (_, rank) => key(rankColour(scene.nodes, rank), `r${rank}`));
  return scene.numRanks > MOST_KEYS ? [...ranks, element("span", {}, `… ${scene.numRanks} ranks: a hue for each place in a node, a tint for each node`)] : ranks;
}

function timeLegend() {
  return [key(theme.accent, state.colour === "rank" ? "attention, in its rank’s colour" : "attention, in its stage’s colour"), key(theme.work, "copies, merges, sums"),
    key(theme.wait, "standing still", true), key(theme.intra, "message inside a node", true), key(theme.inter, "message between nodes", true)];
}

function roleLegend() {
  return [...state.scenes[0].words.roles.map((role, at) => key(roleColour(at), role)), key(roleColour(-1), "scratch")];
}

function linkLegend() {
  return [key(theme.intra, "inside a node"), key(theme.inter, "between nodes"), element("span", {}, "stronger is more, on a square-root scale")];
}

function partLegend() {
  const names = ["attention", "copies, merges, sums", "waiting for messages (exposed)", "between instructions (measured runs)", "done before the last rank (imbalance)"];
  return names.map((name, part) => key(partColours()[part], name));
}

open();
