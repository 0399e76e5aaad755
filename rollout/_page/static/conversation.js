// --- a conversation: steps, tool calls, long texts ------------------------------------------------

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

  const fact = (name, ...content) => el("div", {}, el("dt", {}, name), el("dd", {}, ...content));

  // A label, metadata and the like; a word stays on its line, more folds.
  const named = (name, text, open) => text && (text.length < 120 && !text.includes("\n")
    ? el("p", { class: "named" }, el("span", { class: "quiet" }, name), " ", R.plain(text, el("bdi", { class: "mono" })))
    : fold(name, R.count(text.length) + " characters", open, longText(text, "mono")));

  R.talk = { longText, fold, figures, step, steps, fact, named };
})();
