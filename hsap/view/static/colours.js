// Colours: ranks, stages, roles and links; safe for the colour-blind, readable on light and dark.

// Paul Tol's "muted" qualitative scheme (personal.sron.nl/~pault), in his order; nodes change the lightness.
const HUES = ["#cc6677", "#332288", "#ddcc77", "#117733", "#88ccee", "#882255", "#44aa99", "#999933", "#aa4499"];
// His "bright" scheme for buffers: q, kv, o, do, dq, dkv.
const ROLES = ["#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377"];
// Points of the cividis map (Nuñez, Anderton, Renslow 2018), for what has an order.
const CIVIDIS = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"];
const NODE_TINTS = [0, 0.34, 0.17, 0.5, 0.26, 0.42, 0.09, 0.58];

/** Colours of the page's style sheet for canvases; `read` it again when the theme changes. */
export const theme = { dark: false };

export function readTheme() {
  const chosen = document.documentElement.dataset.theme;
  theme.dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const probe = document.body.appendChild(document.createElement("i"));
  for (const name of ["paper", "plot", "ink", "muted", "faint", "line", "accent", "lit", "intra", "inter", "work", "wait"]) {
    probe.style.color = `var(--${name})`;
    theme[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

export function rankColour(nodes, rank) {
  const first = nodes.indexOf(nodes[rank]);
  const place = rank - first;
  const level = nodes[rank] - nodes[0] + Math.floor(place / HUES.length);
  return adapted(HUES[place % HUES.length], NODE_TINTS[level % NODE_TINTS.length]);
}

export function stageColour(stage, numStages) {
  const part = numStages > 1 ? Math.min(stage / (numStages - 1), 1) : 0.35;
  // The darkest end would be lost on a dark page.
  const at = (theme.dark ? 0.18 + 0.82 * part : 0.94 * part) * (CIVIDIS.length - 1);
  const low = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return mixed(CIVIDIS[low], CIVIDIS[low + 1], at - low);
}

export const roleColour = (role) => (role < 0 ? "#999999" : adapted(ROLES[role], 0));

/** From the plot's ground to full colour as `part` goes from 0 to 1; a trace is told from nothing. */
export function heat(crosses, part) {
  const [r, g, b] = rgb(crosses ? theme.inter : theme.intra);
  const [r0, g0, b0] = rgb(theme.plot);
  const at = 0.12 + 0.88 * part;
  return `rgb(${[r0 + (r - r0) * at, g0 + (g - g0) * at, b0 + (b - b0) * at].map(Math.round)})`;
}

/** Black or white, whichever is read better on a colour. */
export function inkOn(colour) {
  const [r, g, b] = rgb(colour).map((c) => (c / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.22 ? "#14161a" : "#ffffff";
}

/** A colour as one little-endian RGBA number, as canvases' pixels are. */
export function pixel(colour, alpha = 255) {
  const [r, g, b] = rgb(colour);
  return ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export function rgb(colour) {
  if (colour[0] === "#") return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return colour.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function adapted(colour, tint) {
  const towards = theme.dark && rgb(colour).reduce((a, b) => a + b) < 300 ? tint + 0.3 : tint;
  return mixed(colour, "#ffffff", towards);
}

function mixed(a, b, part) {
  const [low, high] = [rgb(a), rgb(b)];
  return "#" + low.map((c, i) => Math.round(c + (high[i] - c) * part).toString(16).padStart(2, "0")).join("");
}
