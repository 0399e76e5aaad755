// --- the table of rollouts: only the rows that are seen are there ---------------------------------

(() => {
  const { el } = R;
  const TALL = 37;
  const STATES = ["queued", "running", "grading", "success", "failure", "cancelled"];
  const age = (row) => (row.ended_at || R.now()) - row.admitted_at;
  const delay = (row) => (row.agent_started_at === undefined ? null : row.agent_started_at - row.admitted_at);
  const text = (name) => (row) => R.plain(row[name] || "", el("bdi"));
  const COLUMNS = [
    { key: "status", name: "Status", sort: (row) => STATES.indexOf(row.status), cell: (row) => el("span", { class: "outcome" }, R.icon(row.status), row.cancelling ? "Cancelling" : R.NAMES[row.status]) },
    { key: "id", name: "Rollout", sort: (row) => row.id, cell: (row) => el("a", { class: "open", href: R.address(row.id) }, R.plain(row.id, el("bdi"))) },
    { key: "run", name: "Run", sort: (row) => row.run || null, cell: text("run") },
    { key: "worker", name: "Worker", sort: (row) => row.worker || null, cell: text("worker") },
    { key: "admitted_at", name: "Admitted", sort: (row) => row.admitted_at, cell: (row) => el("time", { class: "quiet" }, R.clock(row.admitted_at * 1000)) },
    { key: "age", name: "Duration", figure: true, sort: age, cell: (row) => R.seconds(Math.max(0, age(row))) },
    { key: "delay", name: "Until start", figure: true, sort: delay, cell: (row) => R.seconds(delay(row)) },
    { key: "reward", name: "Reward", figure: true, sort: (row) => row.reward ?? null, cell: (row) => R.number(row.reward) },
    { key: "err_category", name: "Category", sort: (row) => row.err_category || null, cell: text("err_category") },
    { key: "err_message", name: "Error", sort: (row) => row.err_message || null, cell: text("err_message") },
  ];
  const view = { query: "", states: new Set(), sort: "admitted_at", down: true };
  let found = [];
  let parts = null;

  R.address = (id) => "#rollout=" + encodeURIComponent(id).replace(/[!'()*~]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase());
  R.neighbour = (id, step) => {
    const place = found.findIndex((row) => row.id === id);
    return { place: place + 1, of: found.length, row: place < 0 ? undefined : found[place + step] };
  };

  function compare(a, b) {
    if (a === b) return 0;
    if (a === null) return 2;
    if (b === null) return -2;
    return a < b ? -1 : 1;
  }

  function select() {
    const query = view.query.trim().toLowerCase();
    const holds = (value) => value !== undefined && value.toLowerCase().includes(query);
    const column = COLUMNS.find((one) => one.key === view.sort);
    found = [];
    for (const row of R.rows.values()) {
      if (view.states.size && !view.states.has(row.status)) continue;
      if (query && !(holds(row.id) || holds(row.run) || holds(row.worker) || holds(row.err_category) || holds(row.err_message))) continue;
      found.push(row);
    }
    const keys = new Map(found.map((row) => [row, column.sort(row)]));
    found.sort((a, b) => {
      const way = compare(keys.get(a), keys.get(b));
      return way === 2 || way === -2 ? way : view.down ? -way : way;
    });
  }

  // The rows in sight, and room above and below for the others.
  function draw() {
    const first = Math.max(0, Math.floor(parts.scroll.scrollTop / TALL) - 10);
    const shown = found.slice(first, first + Math.ceil(parts.scroll.clientHeight / TALL) + 20);
    parts.above.style.height = first * TALL + "px";
    parts.below.style.height = Math.max(0, found.length - first - shown.length) * TALL + "px";
    parts.body.replaceChildren(...shown.map((row, place) => el("tr", { class: "click", "aria-rowindex": first + place + 2, "data-id": row.id },
      COLUMNS.map((column) => el("td", { class: "k-" + column.key + (column.figure ? " figure" : "") }, column.cell(row))))));
    if (!shown.length) parts.body.append(el("tr", {}, el("td", { class: "nothing", colspan: COLUMNS.length }, R.rows.size ? "No rollout fits these filters." : "There are no rollouts yet.")));
    parts.table.setAttribute("aria-rowcount", found.length + 1);
  }

  function headings() {
    parts.head.replaceChildren(...COLUMNS.map((column) => {
      const active = column.key === view.sort;
      const arrow = active && el("span", { class: "arrow", "aria-hidden": "true" }, view.down ? "↓" : "↑");
      return el("th", { scope: "col", class: "k-" + column.key + (column.figure ? " figure" : ""), "aria-sort": active ? (view.down ? "descending" : "ascending") : "none" },
        el("button", { type: "button", onclick: () => sortBy(column) }, column.name, arrow));
    }));
  }

  function sortBy(column) {
    view.down = view.sort === column.key ? !view.down : Boolean(column.figure);
    view.sort = column.key;
    headings();
    parts.head.querySelector(".k-" + column.key + " button").focus({ preventScroll: true });
    R.table();
  }

  R.search = (query) => {
    Object.assign(view, { query, states: new Set() });
    parts.search.value = query;
    R.table();
    document.getElementById("rollouts").scrollIntoView({ block: "start" });
  };

  function build() {
    const search = el("input", { type: "search", id: "search", placeholder: "Search id, run, worker, error", "aria-label": "Search rollouts" });
    search.addEventListener("input", () => { view.query = search.value; R.table(); });
    const chips = STATES.map((state) => [state, el("span", { class: "quiet" }), el("button", {
      type: "button", class: "chip", "aria-pressed": "false", "data-state": state,
      onclick: () => { if (!view.states.delete(state)) view.states.add(state); R.table(); },
    }, R.icon(state), R.NAMES[state])]);
    for (const [, count, chip] of chips) chip.append(count);
    parts = {
      search, chips, count: el("span", { class: "count" }), head: el("tr"), body: el("tbody"), above: el("td"), below: el("td"),
      cancel: el("button", { type: "button", class: "small danger", onclick: () => R.cancel(found.filter(R.active).map((row) => row.id)) }),
    };
    const gap = (cell) => { cell.setAttribute("colspan", COLUMNS.length); return el("tbody", { class: "gap", "aria-hidden": "true" }, el("tr", {}, cell)); };
    parts.table = el("table", { class: "attempts" }, el("thead", {}, parts.head), gap(parts.above), parts.body, gap(parts.below));
    parts.scroll = el("div", { class: "rows", tabindex: "0", "aria-label": "Rollouts" }, parts.table);
    parts.scroll.addEventListener("scroll", draw, { passive: true });
    parts.body.addEventListener("click", (event) => {
      const line = event.target.closest("tr[data-id]");
      if (line && !event.target.closest("a")) location.hash = R.address(line.dataset.id);
    });
    document.getElementById("table").append(
      el("div", { class: "tools" },
        el("div", { class: "tools-line" }, search, parts.cancel, parts.count),
        el("div", { class: "tools-line chips" }, chips.map((one) => one[2]))),
      parts.scroll);
    headings();
  }

  R.table = () => {
    if (parts === null) build();
    select();
    draw();
    const counts = new Map();
    for (const row of R.rows.values()) counts.set(row.status, (counts.get(row.status) || 0) + 1);
    for (const [state, count, chip] of parts.chips) {
      count.textContent = R.count(counts.get(state) || 0);
      chip.setAttribute("aria-pressed", String(view.states.has(state)));
    }
    const active = found.filter(R.active).length;
    parts.count.textContent = R.count(found.length) + " of " + R.count(R.rows.size) + " rollouts";
    parts.cancel.textContent = "Cancel " + R.count(active) + " shown…";
    parts.cancel.disabled = !active;
  };
})();
