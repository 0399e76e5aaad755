// --- an attempt: its facts and its conversation ------------------------------------------------

(() => {
  const { el } = R;
  const SHORT = 1600;
  const SHORT_LINES = 28;
  const STEPS = 60;
  const WHO = { system: "System", user: "User", agent: "Agent", other: "Other" };

  // Long text shows its beginning, and the rest when asked.
  function longText(text, kind) {
    const box = el("div", { class: "text " + kind, dir: "auto" });
    let end = Math.min(text.length, SHORT);
    let at = -1;
    for (let line = 0; line < SHORT_LINES; line++) {
      at = text.indexOf("\n", at + 1);
      if (at < 0 || at > end) break;
      if (line === SHORT_LINES - 1) end = at;
    }
    // What would hide little is not hidden.
    if (text.length - end < 200) return R.plain(text, box);
    if (/[\ud800-\udbff]/.test(text[end - 1])) end -= 1;
    R.plain(text.slice(0, end), box);
    const more = el("button", { type: "button", class: "more", onclick: () => {
      box.replaceChildren();
      R.plain(text, box);
      box.setAttribute("tabindex", "-1");
      box.focus({ preventScroll: true });
    } }, "Show all " + R.count(text.length) + " characters");
    box.append(el("span", { class: "fade" }, "…"), more);
    return box;
  }

  const fold = (name, note, open, ...content) => el("details", { class: "fold", open },
    el("summary", {}, R.plain(name, el("span", { class: "fold-name" })), note && el("span", { class: "quiet" }, note)), ...content);

  const value = (one) => (typeof one !== "number" ? String(one)
    : Number.isInteger(one) && Math.abs(one) < 1e15 ? R.count(one) : String(Number(one.toPrecision(6))));

  function figures(list) {
    return el("p", { class: "figures" }, list.slice(0, 40).map(([name, one, kind]) =>
      el("span", {}, R.plain(name.replaceAll("_", " "), el("bdi", { class: "quiet" })), " ",
        R.plain(value(one), el("bdi")),
        kind === "count" && el("span", { class: "quiet" }, " values"))));
  }

  function preview(call) {
    const text = call.args.map(([name, one]) => (name ? name + ": " : "") + one).join(", ");
    return text.slice(0, 140).replace(/\s+/g, " ") + (text.length > 140 ? "…" : "");
  }

  function observation(one) {
    return el("div", { class: "observation" },
      one.t ? longText(one.t, "mono") : el("p", { class: "quiet" }, "nothing was returned"),
      one.x && longText(one.x, "mono quiet"));
  }

  function toolCall(call) {
    const size = call.o.reduce((sum, one) => sum + one.t.length, 0);
    return el("details", { class: "call" },
      el("summary", {},
        R.plain(call.name, el("bdi", { class: "call-name" })),
        R.plain(preview(call), el("bdi", { class: "call-preview" })),
        el("span", { class: "quiet" }, call.o.length ? R.count(size) + " characters back" : "no observation")),
      el("div", { class: "call-body" },
        el("h5", {}, "Arguments"),
        call.args.length
          ? el("dl", { class: "args" }, call.args.map(([name, one]) =>
            el("div", {}, name && R.plain(name, el("dt")), el("dd", {}, longText(one, "mono")))))
          : el("p", { class: "quiet" }, "none"),
        el("h5", {}, call.o.length > 1 ? "Observations" : "Observation"),
        call.o.length ? call.o.map(observation) : el("p", { class: "quiet" }, "none"),
        call.id && el("p", { class: "quiet tiny" }, "id ", R.plain(call.id.slice(0, 200), el("bdi")))));
  }

  // When a step was, by the clock of the conversation: the first step is its zero.
  function moment(text, zero) {
    const time = Date.parse(text);
    if (Number.isNaN(time) || Number.isNaN(zero)) return R.plain(text.slice(0, 40), el("bdi", { class: "quiet tiny" }));
    const since = (time - zero) / 1000;
    return el("time", { class: "quiet tiny", title: new Date(time).toISOString() },
      (since < 0 ? "−" : "+") + R.seconds(Math.abs(since)));
  }

  function step(one, place, zero) {
    const calls = one.c || [];
    const loose = one.o || [];
    return el("li", { class: "step from-" + one.s },
      el("div", { class: "who" },
        el("h4", {}, one.from ? R.plain(one.from.slice(0, 40), el("bdi")) : WHO[one.s]),
        el("span", { class: "quiet" }, "step " + (place + 1)),
        one.at && moment(one.at, zero)),
      el("div", { class: "said" },
        one.r && fold("Reasoning", R.count(one.r.length) + " characters", false, longText(one.r, "prose reasoning")),
        one.t && longText(one.t, "prose"),
        !one.t && !calls.length && !loose.length && !one.r && el("p", { class: "quiet" }, "(no text)"),
        calls.map(toolCall),
        loose.length > 0 && fold("Observation", R.count(loose.length) + (loose.length > 1 ? " results" : " result"), loose.length === 1 && !one.t, loose.map(observation)),
        one.m && figures(one.m),
        one.x && fold("More of this step", null, false, longText(one.x, "mono"))));
  }

  function steps(list, left) {
    const holder = el("ol", { class: "steps" });
    const more = el("button", { type: "button", class: "more-steps" });
    const zero = Date.parse((list.find((one) => one.at) || {}).at);
    let shown = 0;
    const grow = () => {
      const next = list.slice(shown, shown + STEPS);
      holder.append(...next.map((one, index) => step(one, shown + index, zero)));
      shown += next.length;
      more.hidden = shown >= list.length;
      more.textContent = "Show " + R.count(Math.min(STEPS, list.length - shown)) + " more of " + R.count(list.length) + " steps";
    };
    more.addEventListener("click", () => {
      const first = shown;
      grow();
      const target = holder.children[first];
      target.setAttribute("tabindex", "-1");
      target.focus({ preventScroll: true });
    });
    grow();
    return [holder, more, left ? el("p", { class: "quiet" }, R.count(left) + " more steps are in the trajectory file.") : null];
  }

  function fileLink(name) {
    if (!name || !/^[A-Za-z0-9][\w.-]*$/.test(name)) return null;
    return el("a", { href: "trajectories/" + name, target: "_blank", rel: "noopener noreferrer" }, "trajectory file");
  }

  function delay(record) {
    if (!record.started) return record.state === "cancelled" ? "–" : "agent never started";
    return R.seconds(Math.max(0, (Date.parse(record.started) - Date.parse(record.submitted)) / 1000));
  }

  const fact = (name, ...content) => el("div", {}, el("dt", {}, name), el("dd", {}, ...content));

  function facts(record, talk) {
    return el("dl", { class: "attempt-facts" },
      fact("Reward", el("b", {}, R.number(record.reward ?? null))),
      fact("Duration", R.seconds(record.duration ?? null)),
      fact("Until the agent started", delay(record)),
      fact("Tokens in", R.count(record.prompt ?? null)),
      fact("Tokens out", R.count(record.completion ?? null)),
      fact("Submitted", R.when(Date.parse(record.submitted)) + " UTC"),
      talk.model && fact("Model", R.plain(talk.model.slice(0, 200), el("bdi"))),
      fact("Rollout", R.plain(record.id, el("bdi", { class: "mono" }))),
      record.file && fact("File", fileLink(record.file) || R.plain(record.file, el("bdi"))));
  }

  function others(list) {
    return fold("Other tries of this attempt", R.count(list.length), true,
      el("ul", { class: "tries" }, list.slice(0, 100).map((one) => el("li", {},
        el("span", { class: "outcome" }, R.icon(one.state), R.NAMES[one.state]), " ",
        one.category && R.plain(one.category, el("bdi", { class: "tag" })),
        el("span", { class: "quiet" }, " " + R.when(Date.parse(one.submitted)) + " · " + R.seconds(one.duration ?? null) + (one.superseded ? " · tried again at once" : "") + " "),
        fileLink(one.file),
        one.message && longText(one.message, "prose")))));
  }

  // A label, metadata and the like; a word stays on its line, more folds.
  const named = (name, text, open) => text && (text.length < 120 && !text.includes("\n")
    ? el("p", { class: "named" }, el("span", { class: "quiet" }, name), " ", R.plain(text, el("bdi", { class: "mono" })))
    : fold(name, R.count(text.length) + " characters", open, longText(text, "mono")));

  function content(entry) {
    const { record } = entry;
    const talk = entry.talk || {};
    return [
      facts(record, talk),
      (record.message || record.category) && el("div", { class: "failure", role: "note" },
        el("h3", {}, "Error", record.category && R.plain(record.category, el("bdi", { class: "tag" }))),
        record.message ? longText(record.message, "prose") : el("p", { class: "quiet" }, "without a message")),
      record.metrics && figures(record.metrics),
      named("Label", talk.label, true),
      named("Metadata", talk.metadata, false),
      named("Tools that were offered", talk.tools, false),
      named(talk.named ? "Other fields: " + talk.named : "Other fields", talk.extra, false),
      entry.others.length > 0 && others(entry.others),
      el("h3", { class: "talk-head" }, "Conversation"),
      entry.note && el("p", { class: "quiet note" }, R.plain(entry.note, el("span"))),
      talk.steps ? steps(talk.steps, talk.left || 0) : !entry.note && el("p", { class: "quiet" }, "It has no steps."),
    ].flat().filter(Boolean);
  }

  // --- the dialog -----------------------------------------------------------------------------

  const dialog = document.getElementById("talk");
  let current = -1;
  let opener = null;

  function go(step_) {
    const next = R.neighbour(current, step_).index;
    if (next < 0) return;
    // At once, since the next key may come before the change of the address does.
    current = next;
    // Going through attempts leaves one entry in the history, not hundreds.
    location.replace("#attempt=" + R.name(next));
  }

  R.open = async (index) => {
    current = index;
    const state = R.state(index);
    const { place, of } = R.neighbour(index, 0);
    const button = (label, name, disabled, onclick) =>
      el("button", { type: "button", class: "small", "aria-label": name, title: name, disabled, onclick }, label);
    const body = el("div", { class: "talk-body", tabindex: "0" }, el("p", { class: "quiet" }, "Opening…"));
    const calls = el("button", { type: "button", class: "small unfold", hidden: true, "aria-pressed": "false", onclick: () => {
      const open = calls.getAttribute("aria-pressed") !== "true";
      calls.setAttribute("aria-pressed", String(open));
      calls.textContent = open ? "Fold tool calls" : "Unfold tool calls";
      for (const call of body.querySelectorAll("details.call")) call.open = open;
    } }, "Unfold tool calls");
    dialog.replaceChildren(
      el("header", { class: "talk-top" },
        el("h2", { id: "talk-title" }, "Attempt " + R.name(index)),
        el("span", { class: "outcome" }, R.icon(state), R.NAMES[state]),
        el("span", { class: "talk-buttons" }, calls,
          el("span", { class: "quiet place" }, R.count(place) + " of " + R.count(of)),
          button("‹", "Previous attempt (left arrow)", R.neighbour(index, -1).index < 0, () => go(-1)),
          button("›", "Next attempt (right arrow)", R.neighbour(index, 1).index < 0, () => go(1)),
          button("×", "Close (Esc)", false, R.close))),
      body);
    if (!dialog.open) {
      opener = document.activeElement;
      dialog.showModal();
    }
    body.focus({ preventScroll: true });
    let found;
    try {
      found = content(await R.entry(index));
    } catch (error) {
      found = [el("p", { class: "failure" }, "The conversation cannot be opened: ", R.plain(String(error && error.message), el("span")))];
    }
    // Meanwhile somebody may have gone on to another one.
    if (current !== index) return;
    body.replaceChildren(...found);
    body.scrollTop = 0;
    calls.hidden = !body.querySelector("details.call");
    dialog.dataset.ready = R.name(index);
  };

  // The dialog's own event comes a little later than its end: until then the address would still name
  // what is closed, and asking for it again would change nothing. So whoever closes it clears up too.
  function clear() {
    // Another one may be open by now, or this was done already.
    if (dialog.open || current < 0) return;
    const closed = "#attempt=" + R.name(current);
    current = -1;
    delete dialog.dataset.ready;
    dialog.replaceChildren();
    if (location.hash === closed) history.replaceState(null, "", location.href.split("#")[0]);
    if (opener && opener.isConnected) opener.focus({ preventScroll: true });
  }

  R.close = () => {
    if (dialog.open) dialog.close();
    clear();
  };

  // A modal dialog is printed on one page, and the rest of it is lost. So what it holds leaves it for
  // as long as printing takes.
  const paper = el("div", { class: "paper" });
  let place = null;

  addEventListener("beforeprint", () => {
    if (!dialog.open || paper.isConnected) return;
    const body = dialog.querySelector(".talk-body");
    place = { focused: document.activeElement, body, top: body.scrollTop };
    paper.append(...dialog.childNodes);
    document.body.append(paper);
  });
  addEventListener("afterprint", () => {
    if (!paper.isConnected) return;
    paper.remove();
    if (!dialog.open) {
      paper.replaceChildren();
      return;
    }
    dialog.append(...paper.childNodes);
    place.body.scrollTop = place.top;
    place.focused.focus({ preventScroll: true });
  });

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
})();
