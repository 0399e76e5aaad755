// --- data: the table at once, conversations when they are opened -------------------------------

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  R.charts = data.charts;
  R.all = data.attempts;
  R.size = R.all.size;
  // Where columns and blocks stand: a live page gets them with the report, at the end.
  R.source = document;
  R.name = (index) => R.all.row[index] + "-" + R.all.attempt[index];
  R.state = (index) => R.all.states[R.all.state[index]];
  R.categoryOf = (index) => (R.all.category[index] < 0 ? "" : R.all.categories[R.all.category[index]]);
  R.prompt = (index) => R.all.prompt[group[index]];
  R.label = (index) => R.all.label[group[index]];
  // A figure that is missing is NaN in its column.
  R.told = (value) => !Number.isNaN(value);
  R.value = (column, index) => (R.told(column[index]) ? column[index] : null);

  const KINDS = { d: Float64Array, B: Uint8Array, h: Int16Array, I: Uint32Array, H: Uint16Array };
  let group;

  async function inflate(id) {
    if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to inflate it.");
    const node = R.source.getElementById(id);
    if (!node) throw new Error("the page is not whole.");
    const raw = atob(node.textContent);
    const packed = new Uint8Array(raw.length);
    for (let at = 0; at < raw.length; at++) packed[at] = raw.charCodeAt(at);
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  // The columns stand before this script, so they are all there; once read, their text can go.
  R.load = async () => {
    for (const [name, kind] of Object.entries(R.all.kinds)) {
      R.all[name] = new KINDS[kind](await (await inflate("column-" + name)).arrayBuffer());
    }
    for (const name of ["message", "answer", "prompt", "label"]) R.all[name] = await (await inflate("column-" + name)).json();
    for (const node of R.source.querySelectorAll("script[id^=column-]")) node.remove();
    // Attempts of a row stand together, and share its prompt.
    group = new Uint32Array(R.size);
    for (let index = 1; index < R.size; index++) {
      group[index] = group[index - 1] + (R.all.row[index] === R.all.row[index - 1] ? 0 : 1);
    }
  };

  // They are in order, so none needs an entry of its own.
  R.find = (name) => {
    const [row, attempt] = name.split("-").map(Number);
    let [low, high] = [0, R.size];
    while (low < high) {
      const half = (low + high) >> 1;
      const before = R.all.row[half] < row || (R.all.row[half] === row && R.all.attempt[half] < attempt);
      if (before) low = half + 1; else high = half;
    }
    return low < R.size && R.name(low) === name ? low : -1;
  };

  // The blocks stand behind this script, so the last of them may not be there yet.
  const loaded = new Promise((resolve) => {
    if (document.readyState !== "loading") resolve();
    else document.addEventListener("DOMContentLoaded", resolve, { once: true });
  });

  async function block(number) {
    await loaded;
    return (await inflate("block-" + number)).json();
  }

  // A few blocks are kept, so that going from one attempt to the next is instant.
  const kept = new Map();
  R.entry = async (index) => {
    const number = R.all.block[index];
    if (!kept.has(number)) {
      kept.set(number, block(number));
      if (kept.size > 4) kept.delete(kept.keys().next().value);
    }
    try {
      return (await kept.get(number))[R.all.slot[index]];
    } catch (error) {
      kept.delete(number);
      throw error;
    }
  };

  function holds(value, query) {
    if (typeof value === "string") return value.toLowerCase().includes(query);
    return value !== null && typeof value === "object" && Object.values(value).some((part) => holds(part, query));
  }

  // Names each attempt whose texts hold the query, block by block; `going` says whether to go on.
  R.scan = async (query, found, going) => {
    const members = new Map();
    for (let index = 0; index < R.size; index++) {
      const number = R.all.block[index];
      if (!members.has(number)) members.set(number, []);
      members.get(number).push(index);
    }
    let done = 0;
    for (const [number, indexes] of members) {
      const entries = await block(number);
      for (const index of indexes) if (holds(entries[R.all.slot[index]], query)) found(index);
      done += 1;
      if (!going(done / members.size)) return;
    }
  };
})();
