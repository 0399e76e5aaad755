// --- an attempt: its facts and its conversation, in a dialog -----------------------------------

(() => {
  const { el } = R;
  const { longText, fold, figures, steps, fact, named } = R.talk;

  function fileLink(name) {
    if (!name || !/^[A-Za-z0-9][\w.-]*$/.test(name)) return null;
    return el("a", { href: "trajectories/" + name, target: "_blank", rel: "noopener noreferrer" }, "trajectory file");
  }

  function delay(record) {
    if (!record.started) return record.state === "cancelled" ? "–" : "agent never started";
    return R.seconds(Math.max(0, (Date.parse(record.started) - Date.parse(record.submitted)) / 1000));
  }

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
