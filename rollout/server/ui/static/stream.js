// --- the server's stream: states, put together; the key stays in this tab ------------------------

(() => {
  const KEY = "rollout-server-key";
  const SILENCE = 15000;
  let key = null;
  try { key = sessionStorage.getItem(KEY); } catch { key = null; }

  R.all = { states: ["success", "failure", "cancelled"] };
  Object.assign(R.NAMES, { queued: "Queued", running: "Running", grading: "Grading", success: "Success" });
  R.live = {};
  R.rows = new Map();
  let ahead = 0;
  R.now = () => Date.now() / 1000 + ahead;
  R.active = (row) => row.ended_at === undefined;

  R.ask = async (address, options = {}) => {
    const headers = { ...options.headers };
    if (key !== null) headers.Authorization = "Bearer " + key;
    const answer = await fetch(address, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (answer.ok) return answer;
    const text = await answer.text();
    let detail = text.slice(0, 300);
    try { detail = JSON.parse(text).detail; } catch { detail = detail || "no reason given"; }
    throw Object.assign(new Error(String(detail)), { status: answer.status });
  };

  // Reads the objects of a stream up to its end; one that is silent for too long has broken.
  R.lines = async (address, abort, take) => {
    let timer = 0;
    const wait = () => { clearTimeout(timer); timer = setTimeout(() => abort.abort(), SILENCE); };
    try {
      wait();
      const answer = await R.ask(address, { signal: abort.signal });
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let pieces = [];
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        wait();
        const parts = value.split("\n");
        pieces.push(parts.shift());
        for (const part of parts) {
          const line = pieces.join("");
          pieces = [part];
          if (line) take(JSON.parse(line));
        }
      }
    } finally {
      clearTimeout(timer);
    }
  };

  const line = document.getElementById("live");
  function tell(text, lost) {
    if (line.textContent !== text) { line.textContent = text; R.say(text); }
    line.classList.toggle("lost", Boolean(lost));
  }

  function take(update, fresh) {
    if (fresh) { R.rows.clear(); R.live = {}; }
    const { rows, gone, now, ...sections } = update;
    ahead = now - Date.now() / 1000;
    for (const row of rows) { R.rows.delete(row.id); R.rows.set(row.id, row); }
    for (const id of gone) R.rows.delete(id);
    Object.assign(R.live, sections);
    const { server } = R.live;
    tell(server.accepting ? "Live: this page follows the server." : "The server takes no rollouts: " + (server.state || "it is shutting down") + ".", !server.accepting);
  }

  async function askKey(wrong) {
    const box = R.el("input", { type: "password", autocomplete: "off", "aria-label": "Key of the server" });
    const given = await R.question("This server asks for its key", wrong ? "That was not the key." : "It stays in this tab, until you close it.", "Connect", { box });
    if (!given) return;
    key = box.value;
    try { sessionStorage.setItem(KEY, key); } catch { return; }
  }

  R.follow = async (draw) => {
    let pause = 1000;
    let process = null;
    for (;;) {
      let fresh = true;
      let reason = "the server has ended the stream";
      try {
        await R.lines("rollouts/live", new AbortController(), (update) => {
          take(update, fresh);
          const now = R.live.server.process_id;
          if (fresh && process !== null && process !== now) tell("Live again: the server was started anew.");
          process = now;
          [fresh, pause] = [false, 1000];
          draw();
        });
      } catch (error) {
        if (error.status === 401) {
          tell("The server asks for its key.", true);
          await askKey(key !== null);
          continue;
        }
        reason = error.status ? error.message : "the server does not answer";
      }
      tell("Not connected: " + reason + ". What is shown is old; connecting again…", true);
      await new Promise((resolve) => { setTimeout(resolve, pause); });
      pause = Math.min(2 * pause, 10000);
    }
  };

  // --- questions ----------------------------------------------------------------------------

  const dialog = document.getElementById("question");
  R.question = (title, text, yes, { box = null, danger = false, no = null } = {}) => new Promise((resolve) => {
    let answer = false;
    const close = (given) => { answer = given; dialog.close(); };
    const agree = R.el("button", { type: "button", class: danger ? "small danger" : "small", onclick: () => close(true) }, yes);
    dialog.replaceChildren(
      R.el("h2", { id: "question-title" }, title), R.el("p", { class: "quiet" }, text), ...(box ? [box] : []),
      R.el("div", { class: "choices" }, no && R.el("button", { type: "button", class: "small", onclick: () => close(false) }, no), agree));
    if (box) box.addEventListener("keydown", (event) => { if (event.key === "Enter") close(true); });
    dialog.addEventListener("close", () => { dialog.replaceChildren(); resolve(answer); }, { once: true });
    dialog.showModal();
  });

  R.cancel = async (ids) => {
    if (!ids.length) return;
    const what = ids.length === 1 ? "rollout " + ids[0] : R.count(ids.length) + " rollouts";
    const text = "Its agent is asked to stop, and its result says that it was cancelled. This cannot be taken back.";
    if (!(await R.question("Cancel " + what + "?", text, "Cancel " + (ids.length === 1 ? "it" : "them"), { danger: true, no: "Keep running" }))) return;
    try {
      for (let at = 0; at < ids.length; at += 4000) {
        const body = JSON.stringify({ ids: ids.slice(at, at + 4000) });
        await R.ask("rollout/cancel", { method: "POST", body, headers: { "Content-Type": "application/json" } });
      }
      R.say("Asked to stop: " + what);
    } catch (error) {
      tell("Not cancelled: " + error.message, true);
    }
  };
})();
