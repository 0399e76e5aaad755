// --- data: the table at once, conversations when they are opened -------------------------------

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  R.charts = data.charts;
  R.all = data.attempts;
  R.size = R.all.row.length;
  R.name = (index) => R.all.row[index] + "-" + R.all.attempt[index];
  R.state = (index) => R.all.states[R.all.state[index]];
  R.categoryOf = (index) => (R.all.category[index] < 0 ? "" : R.all.categories[R.all.category[index]]);
  R.prompt = (index) => R.all.prompts[R.all.row[index]] || "";

  const places = new Map();
  for (let index = 0; index < R.size; index++) places.set(R.name(index), index);
  R.find = (name) => (places.has(name) ? places.get(name) : -1);

  // The blocks stand behind this script, so the last of them may not be there yet.
  const loaded = new Promise((resolve) => {
    if (document.readyState !== "loading") resolve();
    else document.addEventListener("DOMContentLoaded", resolve, { once: true });
  });

  async function inflate(number) {
    if (typeof DecompressionStream === "undefined") {
      throw new Error("This browser is too old to open conversations.");
    }
    await loaded;
    const node = document.getElementById("block-" + number);
    if (!node) throw new Error("This page is not whole: the conversation is not in it.");
    const packed = Uint8Array.from(atob(node.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  // A few blocks are kept, so that going from one attempt to the next is instant.
  const kept = new Map();
  R.entry = async (index) => {
    const number = R.all.block[index];
    if (!kept.has(number)) {
      kept.set(number, inflate(number));
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
      const entries = await inflate(number);
      for (const index of indexes) if (holds(entries[R.all.slot[index]], query)) found(index);
      done += 1;
      if (!going(done / members.size)) return;
    }
  };
})();
