// Columns: typed arrays out of a scene's compressed characters; the other end of columns.py.

const TYPES = { b: Int8Array, h: Int16Array, i: Int32Array, d: Float64Array };
const ALIGNMENT = 8;

/** Give the columns of a packed value by name. Differences are added up here. */
export async function unpack({ columns, data }) {
  const packed = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = await new Response(stream).arrayBuffer();
  const out = {};
  let at = 0;
  for (const [name, code, length, rising] of columns) {
    const Type = TYPES[code];
    const values = new Type(bytes, at, length);
    out[name] = rising ? summed(values) : values;
    at += Math.ceil(values.byteLength / ALIGNMENT) * ALIGNMENT;
  }
  return out;
}

function summed(differences) {
  const out = new Int32Array(differences.length);
  let total = 0;
  for (let i = 0; i < differences.length; i++) out[i] = total += differences[i];
  return out;
}

/** First index in [from, to) whose value is above `wanted`; `to` if there is none. Values never fall. */
export function above(values, wanted, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= wanted) from = middle + 1;
    else to = middle;
  }
  return from;
}

/** Group item numbers by owner: items of owner o are `items[offsets[o]]` to `items[offsets[o + 1]]`, in rising order. */
export function grouped(numOwners, owners, items) {
  const offsets = new Int32Array(numOwners + 1);
  for (const owner of owners) offsets[owner + 1]++;
  for (let o = 0; o < numOwners; o++) offsets[o + 1] += offsets[o];
  const next = offsets.slice(0, numOwners);
  const out = new Int32Array(owners.length);
  for (let i = 0; i < owners.length; i++) out[next[owners[i]]++] = items ? items[i] : i;
  return { offsets, items: out, of: (owner) => out.subarray(offsets[owner], offsets[owner + 1]) };
}
