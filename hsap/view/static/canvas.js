// Canvas: two layers, one for the picture and one for what lights up, drawn at most once a frame.

/** Make an element. Strings among children are text; nothing is ever read as HTML. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-")) made.setAttribute(name, String(value));
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export class Canvas {
  /** height: pixels, or a function of the width. draw, drawOver: called with a 2D context in CSS pixels. */
  constructor(label, height, draw, drawOver) {
    this.height = 0;
    this.width = 0;
    this.wanted = height;
    this.layers = [draw, drawOver].map((paint) => {
      const canvas = element("canvas");
      return { canvas, context: canvas.getContext("2d"), paint, stale: true };
    });
    this.host = element("div", { class: "canvas", tabindex: 0, role: "img", "aria-label": label }, ...this.layers.map((l) => l.canvas));
    new ResizeObserver(() => this.resize()).observe(this.host);
  }

  resize() {
    const width = this.host.clientWidth;
    if (!width) return;
    const height = typeof this.wanted === "function" ? this.wanted(width) : this.wanted;
    const ratio = devicePixelRatio;
    if (width === this.width && height === this.height && ratio === this.ratio) return;
    Object.assign(this, { width, height, ratio });
    this.host.style.height = `${height}px`;
    for (const { canvas } of this.layers) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    this.repaint();
  }

  repaint() {
    this.mark(0);
    this.mark(1);
  }

  repaintOver() {
    this.mark(1);
  }

  mark(layer) {
    this.layers[layer].stale = true;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.width) this.paint();
    });
  }

  paint() {
    for (const layer of this.layers) {
      if (!layer.stale) continue;
      layer.stale = false;
      const { context } = layer;
      context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      context.clearRect(0, 0, this.width, this.height);
      context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      layer.paint(context);
    }
  }

  /** Position of a pointer event in CSS pixels. */
  at(event) {
    const box = this.host.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
}

/** Tell about the pointer: `point(x, y, event)` as it moves without a button, null when it leaves, `press` on a click. */
export function follow(canvas, { point, leave, press }) {
  let down = null;
  canvas.host.addEventListener("pointermove", (event) => {
    if (!event.buttons) point(...canvas.at(event), event);
  });
  canvas.host.addEventListener("pointerleave", leave);
  canvas.host.addEventListener("pointerdown", (event) => (down = [event.clientX, event.clientY]));
  canvas.host.addEventListener("click", (event) => {
    const still = down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) < 4;
    if (still) press(...canvas.at(event), event);
  });
}

/**
 * Drag, pinch and wheel, as changes of what is seen: `pan(dx, dy)` in pixels, `zoom(factor, x, y)`.
 *
 * A plain wheel scrolls the page; with Ctrl or ⌘ it zooms, sideways it pans.
 */
export function navigate(canvas, { pan, zoom }) {
  const touching = new Map();
  const { host } = canvas;
  host.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.004)), ...canvas.at(event));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan(-(event.deltaX || event.deltaY), 0);
    }
  }, { passive: false });
  host.addEventListener("pointerdown", (event) => touching.set(event.pointerId, canvas.at(event)));
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    host.addEventListener(end, (event) => touching.delete(event.pointerId));
  }
  host.addEventListener("pointermove", (event) => {
    const before = touching.get(event.pointerId);
    if (!before || !event.buttons) return;
    host.setPointerCapture(event.pointerId);
    const now = canvas.at(event);
    const other = [...touching].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const gap = (point) => Math.hypot(point[0] - other[0], point[1] - other[1]);
      zoom(gap(now) / Math.max(gap(before), 1), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else pan(now[0] - before[0], now[1] - before[1]);
    touching.set(event.pointerId, now);
  });
  host.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 0.5 : 2, ...canvas.at(event)));
}

/** Name what runs across and what runs down a square whose corner is at (margin, margin); at: the words' baseline. */
export function drawSides(context, margin, at, across, down) {
  context.textAlign = "left";
  context.fillText(across, margin, at);
  context.save();
  context.translate(at, margin);
  context.rotate(-Math.PI / 2);
  context.textAlign = "right";
  context.fillText(down, 0, 0);
  context.restore();
}
