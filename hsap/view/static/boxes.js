// Boxes: many thousand rectangles a frame, as pixels that are put on a canvas in one piece.

import { pixel } from "./colours.js";

export class Boxes {
  constructor() {
    this.canvas = document.createElement("canvas");
  }

  /** Begin an empty picture. width, height: CSS pixels; ratio: device pixels in one. */
  clear(width, height, ratio) {
    const [columns, rows] = [Math.max(Math.round(width * ratio), 1), Math.max(Math.round(height * ratio), 1)];
    if (this.columns !== columns || this.rows !== rows) {
      Object.assign(this.canvas, { width: columns, height: rows });
      // Kept in main memory: pixels that are written each frame would be fetched back from a GPU first.
      this.context = this.canvas.getContext("2d", { willReadFrequently: true });
      this.image = this.context.createImageData(columns, rows);
      this.pixels = new Uint32Array(this.image.data.buffer);
      Object.assign(this, { columns, rows });
    } else this.pixels.fill(0);
    this.ratio = ratio;
  }

  /** Fill from device column `left` up to `right`, and from `y` on for `height` CSS pixels. */
  fill(left, right, y, height, colour) {
    const first = Math.max(Math.round(y * this.ratio), 0);
    const last = Math.min(Math.round((y + height) * this.ratio), this.rows);
    const [from, to] = [Math.max(left, 0), Math.min(right, this.columns)];
    if (to <= from) return;
    for (let row = first; row < last; row++) this.pixels.fill(colour, row * this.columns + from, row * this.columns + to);
  }

  /** Put the picture on a canvas at (x, y) CSS pixels. */
  put(context, x, y) {
    this.context.putImageData(this.image, 0, 0);
    context.drawImage(this.canvas, x, y, this.columns / this.ratio, this.rows / this.ratio);
  }
}

/** A colour for canvases and for pixels. */
export const both = (css, alpha = 255) => ({ css, pixel: pixel(css, alpha) });
