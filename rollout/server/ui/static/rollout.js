// --- a rollout: its phases, and its conversation as it unfolds -----------------------------------

(() => {
  const { el } = R;
  const { fact, longText, named, step } = R.talk;
  const dialog = document.getElementById("talk");
  let current = null;
  let opener = null;
  let parts = null;

  function phases(row) {
    const end = row.ended_at || R.now();
    const marks = [["queued", row.admitted_at], ["running", row.agent_started_at], ["grading", row.grading_at]].filter(([, at]) => at !== undefined);
    const spans = marks.map(([name, at], place) => [name, Math.max(0, (place + 1 < marks.length ? marks[place + 1][1] : end) - at)]);
    const bar = el("div", { class: "phases", "aria-hidden": "true" }, spans.map(([name]) => el("span", { class: "s-" + name })));
    spans.forEach(([, seconds], place) => { bar.children[place].style.flexGrow = String(1000 * seconds); });
    return [bar, el("p", { class: "figures" }, spans.map(([name, seconds]) => el("span", {}, R.icon(name), " ", R.NAMES[name], " ", R.seconds(seconds))))];
  }

  // What the table has of it too.
  function refresh() {
    const row = R.rows.get(current);
    if (!row) { parts.facts.replaceChildren(el("p", { class: "notices" }, "This rollout is not shown any more.")); return; }
    const { place, of } = R.neighbour(current, 0);
    parts.state.replaceChildren(R.icon(row.status), row.cancelling ? "Cancelling" : R.NAMES[row.status]);
    parts.place.textContent = R.count(place) + " of " + R.count(of);
    parts.cancel.hidden = !R.active(row) || Boolean(row.cancelling);
    parts.facts.replaceChildren(
      el("dl", { class: "attempt-facts" },
        fact("Reward", el("b", {}, R.number(row.reward))),
        fact("Duration", R.seconds((row.ended_at || R.now()) - row.admitted_at)),
        fact("Admitted", R.when(row.admitted_at * 1000) + " UTC"),
        fact("Agent started", row.agent_started_at === undefined ? "–" : R.when(row.agent_started_at * 1000) + " UTC"),
        row.run && fact("Run", R.plain(row.run, el("bdi"))),
        row.worker && fact("Worker", R.plain(row.worker, el("bdi")))),
      ...phases(row),
      ...(row.err_message || row.err_category ? [el("div", { class: "failure", role: "note" },
        el("h3", {}, "Error", row.err_category && R.plain(row.err_category, el("bdi", { class: "tag" }))),
        row.err_message && longText(row.err_message, "prose"))] : []));
  }

  function take(update) {
    const { body, list, more, note } = parts;
    const below = body.scrollHeight - body.scrollTop - body.clientHeight < 60;
    while (list.children.length > update.from) list.lastChild.remove();
    if (update.from === 0) parts.zero = Date.parse((update.steps.find((one) => one.at) || {}).at);
    list.append(...update.steps.map((one, place) => step(one, update.from + place, parts.zero)));
    const waits = update.calls_in_flight ? "The model is being asked." : "";
    note.textContent = [update.note, waits, update.left ? R.count(update.left) + " more steps are not shown." : ""].filter(Boolean).join(" ");
    more.replaceChildren(...[named("Label", update.label, true), named("Tools that were offered", update.tools, false), named("Other fields", update.extra, false)].filter(Boolean));
    if (below && update.from > 0) body.scrollTop = body.scrollHeight;
    dialog.dataset.ready = current;
  }

  async function follow(id, abort) {
    while (current === id && !abort.signal.aborted) {
      let ended = false;
      const these = new AbortController();
      abort.signal.addEventListener("abort", () => these.abort());
      try {
        await R.lines("rollout/" + encodeURIComponent(id) + "/live", these, (update) => {
          if (current === id) take(update);
          ended = !["queued", "running", "grading"].includes(update.status);
        });
      } catch (error) {
        if (current !== id) return;
        parts.note.textContent = "The conversation cannot be read: " + (error.status ? error.message : "the server does not answer") + ".";
        if (error.status === 404) return;
      }
      if (ended) return;
      await new Promise((resolve) => { setTimeout(resolve, 1000); });
    }
  }

  let running = null;
  R.open = (id) => {
    if (running) running.abort();
    running = new AbortController();
    current = id;
    delete dialog.dataset.ready;
    const button = (label, name, onclick) => el("button", { type: "button", class: "small", "aria-label": name, title: name, onclick }, label);
    parts = {
      state: el("span", { class: "outcome" }), place: el("span", { class: "quiet place" }), facts: el("div"), more: el("div"),
      list: el("ol", { class: "steps" }), note: el("p", { class: "quiet note" }), zero: NaN,
      cancel: el("button", { type: "button", class: "small danger", onclick: () => R.cancel([id]) }, "Cancel…"),
    };
    parts.body = el("div", { class: "talk-body", tabindex: "0" }, parts.facts, parts.more, el("h3", { class: "talk-head" }, "Conversation"), parts.list, parts.note);
    dialog.replaceChildren(
      el("header", { class: "talk-top" },
        R.plain(id, el("h2", { id: "talk-title" })), parts.state,
        el("span", { class: "talk-buttons" }, parts.cancel, parts.place,
          button("‹", "Previous rollout (left arrow)", () => go(-1)), button("›", "Next rollout (right arrow)", () => go(1)), button("×", "Close (Esc)", R.close))),
      parts.body);
    if (!dialog.open) {
      opener = document.activeElement;
      dialog.showModal();
    }
    parts.body.focus({ preventScroll: true });
    refresh();
    follow(id, running);
  };

  function go(by) {
    const { row } = R.neighbour(current, by);
    if (row) location.replace(R.address(row.id));
  }

  function clear() {
    if (dialog.open || current === null) return;
    running.abort();
    [running, current] = [null, null];
    dialog.replaceChildren();
    delete dialog.dataset.ready;
    if (location.hash.startsWith("#rollout=")) history.replaceState(null, "", location.href.split("#")[0]);
    if (opener && opener.isConnected) opener.focus({ preventScroll: true });
  }
  R.close = () => { if (dialog.open) dialog.close(); clear(); };
  R.rollout = () => { if (current !== null) refresh(); };

  dialog.addEventListener("close", clear);
  dialog.addEventListener("click", (event) => { if (event.target === dialog) R.close(); });
  dialog.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.key === "ArrowRight" || event.key === "j") go(1);
    else if (event.key === "ArrowLeft" || event.key === "k") go(-1);
    else if (event.key === "Escape") R.close();
    else return;
    event.preventDefault();
  });

  // --- the page comes together --------------------------------------------------------------

  function hash() {
    const match = /^#rollout=(.+)$/.exec(location.hash);
    let id = null;
    try { id = match && decodeURIComponent(match[1]); } catch { id = null; }
    if (id === null) R.close();
    else if (id !== current) R.open(id);
  }
  let begun = false;
  R.theme();
  R.searchKey([dialog, document.getElementById("question")]);
  R.follow(() => {
    R.figures();
    R.table();
    R.rollout();
    if (begun) return;
    begun = true;
    window.addEventListener("hashchange", hash);
    hash();
    document.documentElement.dataset.ready = "true";
  });
})();
