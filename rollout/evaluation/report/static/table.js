// --- the table of attempts: filtered, sorted, a page at a time ---------------------------------

(() => {
  const { el } = R;
  const all = R.all;
  const low = (text) => text.toLowerCase();

  const value = (name) => (index) => R.value(all[name], index);
  const figure = (key, name) => ({ key, name, figure: true, sort: value(key) });
  // What is known once the columns are there; one that would be empty from top to bottom is left out.
  let COLUMNS;
  let GROUPED;
  let spread;

  function settle() {
    const some = (name) => all[name].some(R.told);
    COLUMNS = [
      { key: "id", name: "Attempt", sort: (i) => i },
      { key: "state", name: "Outcome", sort: (i) => all.state[i] },
      figure("reward", "Reward"),
      all.categories.length > 0 && { key: "category", name: "Category", sort: (i) => R.categoryOf(i) || null },
      figure("duration", "Duration"),
      some("tokens_in") && figure("tokens_in", "Tokens in"),
      some("tokens_out") && figure("tokens_out", "Tokens out"),
      all.tries.some((tries) => tries > 1) && figure("tries", "Tries"),
      { key: "submitted", name: "Submitted", sort: (i) => all.submitted[i] },
      all.label.some(Boolean) && { key: "label", name: "Expected", sort: (i) => low(R.label(i)) || null },
      all.answer.some(Boolean) && { key: "answer", name: "Answer", sort: (i) => low(all.answer[i]) || null },
      { key: "text", name: "Prompt or error", sort: (i) => low(text(i)) || null },
    ].filter(Boolean);
    GROUPED = [
      { key: "id", name: "Row", sort: (g) => g.row },
      { key: "dots", name: "Attempts", sort: (g) => g.items.length },
      { key: "passed", name: "Passed", figure: true, sort: (g) => g.passed / g.items.length },
      { key: "reward", name: "Mean reward", figure: true, sort: (g) => g.reward },
      { key: "duration", name: "Mean duration", figure: true, sort: (g) => g.duration },
      some("tokens_out") && { key: "tokens_out", name: "Tokens out", figure: true, sort: (g) => g.tokens },
      all.label.some(Boolean) && { key: "label", name: "Expected", sort: (g) => low(R.label(g.items[0])) || null },
      { key: "text", name: "Prompt", sort: (g) => low(R.prompt(g.items[0])) || null },
    ].filter(Boolean);
    let [least, most] = [0, 0];
    for (const reward of all.reward) if (R.told(reward)) { least = Math.min(least, reward); most = Math.max(most, reward); }
    spread = { least, width: most - least };
  }

  const view = {
    query: "", states: new Set(), category: null, from: null, to: null, below: false,
    deep: false, sort: "id", down: false, grouped: false, page: 0, size: 100,
  };
  let found = [];
  let hits = new Set();
  let looks = 0;
  let lines = [];
  let parts;

  function text(index) {
    return all.message[index] || R.prompt(index);
  }

  function mean(items, column) {
    let [sum, count] = [0, 0];
    for (const index of items) if (R.told(column[index])) { sum += column[index]; count += 1; }
    return count ? sum / count : null;
  }

  function matches(index) {
    if (view.states.size && !view.states.has(R.state(index))) return false;
    if (view.category !== null && R.categoryOf(index) !== view.category) return false;
    if (view.from !== null || view.to !== null) {
      const reward = all.reward[index];
      if (!R.told(reward) || (view.from !== null && reward < view.from)) return false;
      if (view.to !== null && (view.below ? reward >= view.to : reward > view.to)) return false;
    }
    return true;
  }

  // Numbers before names, and what is missing last, whichever way it is sorted.
  function compare(a, b) {
    if (a === b) return 0;
    if (a === null) return 2;
    if (b === null) return -2;
    return a < b ? -1 : 1;
  }
  function order(items, columns) {
    const column = columns.find((one) => one.key === view.sort) || columns[0];
    const keys = items.map(column.sort);
    const places = Uint32Array.from(items, (_, place) => place);
    places.sort((a, b) => {
      const way = compare(keys[a], keys[b]);
      if (way === 2 || way === -2) return way;
      return (view.down ? -way : way) || a - b;
    });
    return Array.from(places, (place) => items[place]);
  }

  function refresh(keepPage) {
    const query = low(view.query.trim());
    found = [];
    for (let index = 0; index < R.size; index++) {
      if (!matches(index)) continue;
      if (query && !(hits.has(index) || R.name(index).startsWith(query) || low(all.message[index]).includes(query) ||
        low(R.prompt(index)).includes(query) || low(R.label(index)).includes(query) || low(all.answer[index]).includes(query) || low(R.categoryOf(index)).includes(query))) continue;
      found.push(index);
    }
    if (view.grouped) {
      const groups = new Map();
      for (const index of found) {
        const row = all.row[index];
        if (!groups.has(row)) groups.set(row, { row, items: [] });
        groups.get(row).items.push(index);
      }
      for (const group of groups.values()) {
        group.passed = group.items.filter((index) => R.state(index) === "passed").length;
        group.reward = mean(group.items, all.reward);
        group.duration = mean(group.items, all.duration);
        group.tokens = mean(group.items, all.tokens_out);
      }
      lines = order([...groups.values()], GROUPED);
      found = lines.flatMap((group) => group.items);
    } else {
      found = order(found, COLUMNS);
      lines = found;
    }
    if (!keepPage) view.page = 0;
    render();
  }

  // Conversations are compressed, so they are searched a block at a time, and only when asked.
  async function look() {
    const turn = ++looks;
    const query = low(view.query.trim());
    hits = new Set();
    refresh();
    if (!view.deep || !query) return;
    const these = new Set();
    try {
      await R.scan(query, (index) => these.add(index), (share) => {
        if (turn !== looks) return false;
        parts.count.textContent = "Searching conversations: " + R.percent(share);
        return true;
      });
    } catch (error) {
      parts.count.textContent = "The conversations cannot be searched: " + error.message;
      return;
    }
    if (turn !== looks) return;
    hits = these;
    refresh();
  }

  // --- what is seen -------------------------------------------------------------------------

  const link = (index, ...content) => el("a", { href: "#attempt=" + R.name(index), class: "open" }, ...content);

  function rewardCell(reward, state) {
    if (reward === null) return el("span", { class: "quiet" }, "–");
    const bar = el("span", { class: state ? "mini-bar s-" + state : "mini-bar" });
    if (spread.width > 0 && Number.isFinite(spread.width)) {
      const zero = -spread.least / spread.width;
      const at = (reward - spread.least) / spread.width;
      bar.style.left = Math.min(zero, at) * 100 + "%";
      bar.style.width = Math.abs(at - zero) * 100 + "%";
    }
    return el("span", { class: "reward" }, el("span", { class: "mini", "aria-hidden": "true" }, bar), R.number(reward));
  }

  function cells(index) {
    const state = R.state(index);
    const message = all.message[index];
    return {
      id: link(index, R.name(index)),
      state: el("span", { class: "outcome" }, R.icon(state), R.NAMES[state]),
      reward: rewardCell(R.value(all.reward, index), state),
      category: R.plain(R.categoryOf(index), el("bdi")),
      duration: R.seconds(R.value(all.duration, index)),
      tokens_in: R.count(R.value(all.tokens_in, index)),
      tokens_out: R.count(R.value(all.tokens_out, index)),
      tries: all.tries[index] > 1 ? String(all.tries[index]) : el("span", { class: "quiet" }, "1"),
      submitted: el("time", { title: R.when(all.submitted[index]) + " UTC" }, R.clock(all.submitted[index])),
      label: R.plain(R.label(index), el("bdi", { class: "cut" })),
      answer: R.plain(all.answer[index], el("bdi", { class: "cut message" })),
      text: R.plain(text(index), el("bdi", { class: message ? "cut message" : "cut" })),
    };
  }

  function groupCells(group) {
    return {
      id: el("b", {}, String(group.row)),
      dots: el("span", { class: "dots" }, group.items.slice(0, 64).map((index) => {
        const name = R.name(index) + ", " + R.NAMES[R.state(index)] +
          (!R.told(all.reward[index]) ? "" : ", reward " + R.number(all.reward[index]));
        return el("a", { href: "#attempt=" + R.name(index), class: "dot-link", title: name, "aria-label": name }, R.icon(R.state(index)));
      }), group.items.length > 64 && " +" + (group.items.length - 64)),
      passed: group.passed + " of " + group.items.length,
      reward: rewardCell(group.reward),
      duration: R.seconds(group.duration),
      tokens_out: R.count(group.tokens),
      label: R.plain(R.label(group.items[0]), el("bdi", { class: "cut" })),
      text: R.plain(R.prompt(group.items[0]), el("bdi", { class: "cut" })),
    };
  }

  function render() {
    const columns = view.grouped ? GROUPED : COLUMNS;
    const pages = Math.max(1, Math.ceil(lines.length / view.size));
    view.page = Math.max(0, Math.min(view.page, pages - 1));
    const first = view.page * view.size;
    const shown = lines.slice(first, first + view.size);

    const arrow = () => el("span", { class: "arrow", "aria-hidden": "true" }, view.down ? "↓" : "↑");
    parts.head.replaceChildren(...columns.map((column) => {
      const active = column.key === view.sort;
      return el("th", {
        scope: "col", class: "k-" + column.key + (column.figure ? " figure" : ""),
        "aria-sort": active ? (view.down ? "descending" : "ascending") : "none",
      }, el("button", { type: "button", onclick: () => sortBy(column.key) },
        column.figure && active && arrow(), column.name, !column.figure && active && arrow()));
    }));
    parts.body.replaceChildren(...shown.map((item) => {
      const content = view.grouped ? groupCells(item) : cells(item);
      return el("tr", { class: view.grouped ? null : "click", "data-name": view.grouped ? null : R.name(item) },
        columns.map((column) => el("td", {
          class: "k-" + column.key + (column.figure ? " figure" : ""), "data-name": column.name,
        }, content[column.key])));
    }));
    if (!shown.length) {
      parts.body.append(el("tr", {}, el("td", { class: "nothing", colspan: columns.length },
        R.size ? "No attempt fits these filters." : "This run has no attempts yet.")));
    }
    const unit = view.grouped ? " rows" : " attempts";
    const count = lines.length
      ? R.count(first + 1) + "–" + R.count(first + shown.length) + " of " + R.count(lines.length) + unit
      : "0" + unit;
    parts.count.textContent = count;
    R.say(count);
    parts.pageText.textContent = "Page " + R.count(view.page + 1) + " of " + R.count(pages);
    parts.back.disabled = parts.start.disabled = view.page === 0;
    parts.next.disabled = parts.end.disabled = view.page >= pages - 1;
    parts.pager.hidden = pages === 1 && view.size === 100;
    for (const [state, button] of parts.states) button.setAttribute("aria-pressed", String(view.states.has(state)));
    parts.clear.hidden = !(view.query || view.states.size || view.category !== null || view.from !== null || view.to !== null);
    parts.sort.replaceChildren(...columns.map((column) => el("option", { value: column.key }, column.name)));
    parts.sort.value = columns.some((column) => column.key === view.sort) ? view.sort : "id";
    parts.way.textContent = view.down ? "↓" : "↑";
  }

  function sortBy(key) {
    if (view.sort === key) view.down = !view.down;
    else {
      view.sort = key;
      const column = (view.grouped ? GROUPED : COLUMNS).find((one) => one.key === key);
      view.down = Boolean(column.figure);
    }
    refresh();
    // The head was made anew, so the button that was pressed gets the focus back.
    const again = parts.head.querySelector(".k-" + key + " button");
    if (again) again.focus({ preventScroll: true });
  }

  // --- what can be asked for ----------------------------------------------------------------

  function fields() {
    parts.search.value = view.query;
    parts.category.value = view.category === null ? "*" : "=" + view.category;
    parts.from.value = view.from === null ? "" : String(view.from);
    parts.to.value = view.to === null ? "" : String(view.to);
  }

  // A click on a chart sets the filters that fit it.
  R.pick = ({ states = [], category = null, from = null, to = null, below = false }) => {
    Object.assign(view, { query: "", states: new Set(states), category, from, to, below });
    fields();
    look();
    document.getElementById("attempts").scrollIntoView({ block: "start" });
  };

  function limit(name) {
    return (event) => {
      const value = event.target.value.trim();
      view[name] = value === "" || !Number.isFinite(Number(value)) ? null : Number(value);
      view.below = false;
      refresh();
    };
  }

  function turn(to) {
    return () => { view.page = to(); render(); };
  }

  // A long run is searched once typing pauses.
  function later(action) {
    let timer = 0;
    return () => { clearTimeout(timer); timer = setTimeout(action, view.deep ? 300 : R.size > 2000 ? 150 : 0); };
  }

  // What there is to choose from.
  function choices() {
    const counts = new Map();
    for (let index = 0; index < R.size; index++) counts.set(R.state(index), (counts.get(R.state(index)) || 0) + 1);
    parts.states = all.states.filter((state) => counts.has(state)).map((state) => [state, el("button", {
      type: "button", class: "chip", "aria-pressed": "false", "data-state": state,
      onclick: () => { if (!view.states.delete(state)) view.states.add(state); refresh(); },
    }, R.icon(state), R.NAMES[state], el("span", { class: "quiet" }, R.count(counts.get(state))))]);
    parts.chips.replaceChildren(...parts.states.map((one) => one[1]));
    parts.category.replaceChildren(el("option", { value: "*" }, "All categories"), el("option", { value: "=" }, "No category"),
      ...all.categories.map((name) => R.plain(name, el("option", { value: "=" + name }))));
    parts.category.hidden = all.categories.length === 0;
    parts.category.value = view.category === null ? "*" : "=" + view.category;
  }

  // Draws the table of other attempts, with what was asked for.
  R.retable = () => {
    settle();
    choices();
    hits = new Set();
    if (view.deep && view.query) look();
    else refresh(true);
  };

  R.table = () => {
    settle();
    const button = (label, name, onclick) => el("button", { type: "button", class: "small", "aria-label": name, onclick }, label);
    const search = el("input", { type: "search", placeholder: "Search prompt, answer, error, row-attempt", "aria-label": "Search attempts", id: "search" });
    search.addEventListener("input", later(() => { view.query = search.value; look(); }));
    parts = {
      search,
      states: [],
      chips: el("div", { class: "chips", role: "group", "aria-label": "Outcomes" }),
      category: el("select", { "aria-label": "Error category", onchange: (event) => {
        view.category = event.target.value === "*" ? null : event.target.value.slice(1);
        refresh();
      } }),
      from: el("input", { type: "number", step: "any", placeholder: "from", "aria-label": "Least reward", onchange: limit("from") }),
      to: el("input", { type: "number", step: "any", placeholder: "to", "aria-label": "Greatest reward", onchange: limit("to") }),
      clear: button("Clear filters", "Clear filters", () => {
        Object.assign(view, { query: "", states: new Set(), category: null, from: null, to: null, below: false });
        fields();
        look();
        search.focus();
      }),
      sort: el("select", { "aria-label": "Sort by", onchange: (event) => { view.sort = event.target.value; refresh(); } }),
      way: button("↑", "Turn the order round", () => { view.down = !view.down; refresh(); }),
      head: el("tr"), body: el("tbody"),
      count: el("p", { class: "count" }),
      pageText: el("span", { class: "page" }),
      start: button("«", "First page", turn(() => 0)),
      back: button("‹", "Previous page", turn(() => view.page - 1)),
      next: button("›", "Next page", turn(() => view.page + 1)),
      end: button("»", "Last page", turn(() => Infinity)),
    };
    parts.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr.click");
      if (!row || event.target.closest("a") || String(getSelection())) return;
      location.hash = "#attempt=" + row.dataset.name;
    });
    parts.pager = el("nav", { class: "pager", "aria-label": "Pages" },
      parts.start, parts.back, parts.pageText, parts.next, parts.end,
      el("label", { class: "per" }, "per page ", el("select", {
        onchange: (event) => { view.size = Number(event.target.value); refresh(); },
      }, [50, 100, 250, 500].map((size) => el("option", { value: String(size), selected: size === 100 }, String(size))))));
    document.getElementById("table").append(
      el("div", { class: "tools", role: "search" },
        el("div", { class: "tools-line" }, search,
          el("label", { class: "check" }, el("input", { type: "checkbox", id: "deep", onchange: (event) => {
            view.deep = event.target.checked;
            look();
          } }), "and conversations"),
          parts.category,
          el("span", { class: "range", role: "group", "aria-label": "Reward" }, el("span", { class: "quiet" }, "Reward"), parts.from, parts.to),
          el("label", { class: "check" }, el("input", { type: "checkbox", id: "grouped", onchange: (event) => {
            Object.assign(view, { grouped: event.target.checked, sort: "id", down: false });
            refresh();
          } }), "Group by row")),
        el("div", { class: "tools-line" },
          parts.chips,
          parts.clear,
          el("span", { class: "sorter" }, parts.sort, parts.way),
          parts.count)),
      el("div", { class: "scroll" },
        el("table", { class: "attempts" }, el("caption", { class: "hidden" }, "Attempts of the run"),
          el("thead", {}, parts.head), parts.body)),
      parts.pager);
    choices();
    refresh();
  };

  // The attempt before or after one, in the order that the table has; -1 at the ends.
  R.neighbour = (index, step) => {
    const list = found.includes(index) ? found : Array.from({ length: R.size }, (_, i) => i);
    const place = list.indexOf(index) + step;
    return { index: place >= 0 && place < list.length ? list[place] : -1, place: list.indexOf(index) + 1, of: list.length };
  };
})();
